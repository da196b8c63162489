"""Rank 0's consumer of `groups`: assigned to every partition, read committed, from given offsets.

Nothing is committed here: the checkpoint holds the offsets.
"""

import logging
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.clients import consumer_config
from schemas.codec import decode_as
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, ManifestMismatch, OffsetsLost, RecordUnreadable
from schemas.records import AssembledGroup
from schemas.topics import Topics
from trainer.batching import GroupRead

MANY = 1000
ANSWER_S = 30.0
_OFFSET_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_log = logging.getLogger(__name__)


class GroupsReader:
    """One thread."""

    def __init__(self, kafka: KafkaConfig, topics: Topics) -> None:
        self._topic = topics.groups
        self._consumer = Consumer(consumer_config(kafka, f"{topics.run_id}.trainer.groups"))

    def first_offsets(self, num_partitions: int) -> dict[int, int]:
        """The first offset of each partition. Raises ManifestMismatch for another count."""
        metadata = self._consumer.list_topics(self._topic, timeout=ANSWER_S).topics[self._topic]
        if metadata.error is not None:
            raise KafkaException(metadata.error)
        if len(metadata.partitions) != num_partitions:
            raise ManifestMismatch(
                f"{self._topic} has {len(metadata.partitions)} partitions, the run was created "
                f"with {num_partitions}: a run's partitions can't be changed, start a new run"
            )
        return {partition: self._ends(partition)[0] for partition in range(num_partitions)}

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Raises OffsetsLost where a partition no longer has its offset."""
        for partition, offset in sorted(offsets.items()):
            first, end = self._ends(partition)
            if not first <= offset <= end:
                raise OffsetsLost(
                    f"the checkpoint goes on at offset {offset} of {self._topic} partition "
                    f"{partition}, which has {first} to {end}: groups that were not yet trained "
                    "are gone; start a new run from the newest weights"
                )
        self._consumer.assign(
            [
                TopicPartition(self._topic, partition, offset)
                for partition, offset in offsets.items()
            ]
        )

    def poll(self, timeout_s: float) -> list[GroupRead]:
        """What has arrived, waiting `timeout_s` for the first. Raises RecordUnreadable."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        messages = [first, *self._consumer.consume(MANY, 0)]
        return [self._read(message) for message in messages if self._is_record(message)]

    def close(self) -> None:
        self._consumer.close()

    def _ends(self, partition: int) -> tuple[int, int]:
        try:
            first, end = self._consumer.get_watermark_offsets(
                TopicPartition(self._topic, partition), timeout=ANSWER_S
            )
        except KafkaException as error:
            if not error.args[0].retriable() and error.args[0].code() != KafkaError._TIMED_OUT:
                raise
            raise DeadlineExceeded(
                f"the offsets of {self._topic} partition {partition} did not come within "
                f"{ANSWER_S:.0f} s: {error.args[0].str()}; does the broker answer?"
            ) from error
        return first, end

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() in _OFFSET_GONE:
            raise OffsetsLost(
                f"{self._topic} partition {message.partition()} lost records that were not yet "
                f"trained: {error.str()}; start a new run from the newest weights"
            )
        if error.fatal():
            raise KafkaException(error)
        _log.warning("%s: %s; the client goes on trying", self._topic, error.str())
        return False

    def _read(self, message: Message) -> GroupRead:
        partition, offset = message.partition(), message.offset()
        try:
            group = decode_as(message.value(), AssembledGroup)
        except RecordUnreadable as error:
            raise RecordUnreadable(
                error.reason, f"{self._topic} partition {partition} offset {offset}: {error}"
            ) from error
        return GroupRead(partition, offset, group)
