"""The run's own facts, folded from the `control` topic.

`ControlState` is pure; `ControlLog` is the consumer that feeds it, read committed, in order.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas import topics as keys
from schemas.clients import common_config, consumer_config
from schemas.codec import decode
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, ManifestMismatch, RunStopped
from schemas.kafka_errors import PASSING
from schemas.offsets import ends
from schemas.records import (
    CheckpointRecorded,
    Fatal,
    Finished,
    LastTarget,
    Manifest,
    NextTaskIndex,
    PolicyVersion,
    Record,
    TargetSize,
)
from schemas.topics import Topics

NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT)
TOPIC_APPEARS_S = 5.0  # a broker that has just started may not know it yet


@dataclass
class ControlState:
    """The newest value of each key. `highest_version` never falls, not even after a restore."""

    manifest: Manifest | None = None
    policy: PolicyVersion | None = None
    checkpoint: CheckpointRecorded | None = None
    targets: dict[int, int] = field(default_factory=dict)
    last_target: int | None = None
    next_task_index: int | None = None
    fatal: Fatal | None = None
    finished: Finished | None = None
    highest_version: int = -1

    def apply(self, key: str, record: Record | None) -> None:
        """`record` is None for a tombstone. Unknown keys are a newer program's and are left."""
        match record:
            case None:
                if key == keys.CONTROL_FATAL:
                    self.fatal = None
            case Manifest():
                self.manifest = record
            case PolicyVersion():
                self.policy = record
                self.highest_version = max(self.highest_version, record.version)
            case CheckpointRecorded():
                self.checkpoint = record
            case TargetSize():
                self.targets[record.target_step] = record.groups
            case LastTarget():
                self.last_target = record.target_step
            case NextTaskIndex():
                self.next_task_index = record.task_index
            case Fatal():
                self.fatal = record
            case Finished():
                self.finished = record

    def raise_if_fatal(self) -> None:
        if self.fatal is not None:
            raise RunStopped(f"the run was stopped by the {self.fatal.role}: {self.fatal.message}")


class ControlLog:
    """Follows `control` from its beginning. One thread."""

    def __init__(self, kafka: KafkaConfig, topics: Topics, client_id: str) -> None:
        self.state = ControlState()
        self._topic = topics.control
        self._next_offset = 0
        self._ended = -1  # where the end was last seen: it is reported once, not at each call
        settings: dict[str, Any] = consumer_config(kafka, f"{client_id}.control")
        self._consumer = Consumer(
            settings | {"enable.partition.eof": True, "auto.offset.reset": "earliest"}
        )
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])
        # Warnings and worse: it says at its end that it ends with events unserved.
        settings = common_config(kafka, f"{client_id}.control.end") | {"log_level": 4}
        self._admin = AdminClient(settings)

    def read_to_end(self, deadline_s: float = 60.0) -> ControlState:
        """Everything committed when this was called. Raises DeadlineExceeded."""
        end = time.monotonic() + deadline_s
        written = self._written_end(end)
        while (left := end - time.monotonic()) > 0:
            if max(self._next_offset, self._ended) >= written:
                return self.state
            message = self._consumer.poll(min(left, 0.1))
            if message is None:
                continue
            if message.error() is None:
                self._apply(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                self._ended = message.offset()
            elif not message.error().retriable():
                raise KafkaException(message.error())
        raise DeadlineExceeded(
            f"{self._topic} was not read to its end (offset {written}) within {deadline_s:.0f} s: "
            "does the broker answer, and does a hung transaction end?"
        )

    def _written_end(self, end: float) -> int:
        """One past the last record written, committed or not. A leader may just be changing.

        Not the last stable offset: a commit returns before its markers are written, and what it
        covered would be missed.
        """
        place = self._topic, 0
        missing_from: float | None = None  # the broker may be away until long after our start
        while True:
            left = end - time.monotonic()
            try:
                written = IsolationLevel.READ_UNCOMMITTED
                return ends(self._admin, [place], written, max(0.1, left))[place]
            except KafkaException as error:
                code = error.args[0].code()
                if code not in NO_TOPIC:
                    missing_from = None
                elif missing_from is None:
                    missing_from = time.monotonic()
                elif time.monotonic() - missing_from > TOPIC_APPEARS_S:
                    raise ManifestMismatch(
                        f"topic {self._topic} does not exist: create the run with "
                        "`groupstream-init` first, or correct run.id or kafka.bootstrap_servers"
                    ) from error
                if code not in (*PASSING, *NO_TOPIC):
                    raise
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the end of {self._topic} was not told in time ({error.args[0].str()}): "
                        "does the broker answer?"
                    ) from error
                time.sleep(0.1)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Applies what has arrived, waiting `timeout_s` for the first; True where any did."""
        changed = False
        wait = timeout_s
        while (message := self._consumer.poll(wait)) is not None:
            wait = 0.0
            if message.error() is None:
                self._apply(message)
                changed = True
            elif message.error().code() == KafkaError._PARTITION_EOF:
                self._ended = message.offset()
            elif message.error().fatal():
                raise KafkaException(message.error())
        return changed

    @property
    def position(self) -> int:
        """Offset of the next record that `poll` would apply."""
        return self._next_offset

    def close(self) -> None:
        self._consumer.close()
        del self._admin  # it has no close(), and would go on to look for the broker

    def _apply(self, message: Any) -> None:
        value = message.value()
        self._next_offset = message.offset() + 1
        self.state.apply(message.key().decode(), None if value is None else decode(value))
