"""What goes: superseded weights and checkpoints, and groups that no kept checkpoint needs.

The order matters: a checkpoint's directory is gone before the groups that only it needed are.
"""

import logging

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.clients import common_config
from schemas.config import Config
from schemas.topics import Topics
from trainer.checkpoint import read_progress
from trainer.directories import (
    checkpoints_in,
    remove,
    superseded_checkpoints,
    superseded_weights,
    weights_in,
)

ANSWER_S = 30.0
_log = logging.getLogger(__name__)


class Retention:
    """Removes directories and deletes records of `groups`."""

    def __init__(self, config: Config, topics: Topics) -> None:
        self._config = config
        self._topic = topics.groups
        self._admin = AdminClient(common_config(config.kafka, f"{topics.run_id}.trainer.admin"))
        self._deleted: dict[int, int] = {}

    def after_announcement(self, version: int) -> None:
        """`version` is announced: removes the weights that nobody loads any more."""
        for path in superseded_weights(weights_in(self._config.weights_directory), version):
            remove(path)

    def after_checkpoint(self, step: int) -> None:
        """`step` is recorded: keeps the newest checkpoints and the groups that they need."""
        directory = self._config.checkpoint_directory
        keep = self._config.checkpointing.keep_top_k
        for path in superseded_checkpoints(checkpoints_in(directory), step, keep):
            _log.info("removing checkpoint %s, %d newer ones are kept", path, keep)
            remove(path)
        self._delete_below(read_progress(checkpoints_in(directory)[0].path).offsets)

    def _delete_below(self, offsets: dict[int, int]) -> None:
        """Lets the groups below `offsets` go; what fails is tried at the next checkpoint."""
        due = [
            TopicPartition(self._topic, partition, offset)
            for partition, offset in sorted(offsets.items())
            if offset > self._deleted.get(partition, 0)
        ]
        if not due:
            return
        for partition, future in self._admin.delete_records(
            due, request_timeout=ANSWER_S, operation_timeout=ANSWER_S
        ).items():
            try:
                future.result(ANSWER_S)
                self._deleted[partition.partition] = partition.offset
            except (KafkaException, TimeoutError) as error:
                _log.warning("%s stays below %s: %s", self._topic, partition, error)
