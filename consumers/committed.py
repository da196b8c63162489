"""What the last commit says about a partition of `rows`: where to begin, and what is settled.

Nothing is ever assumed in its place: an error is no "no commit", and no commit is only legal
where nothing was ever settled.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from consumers.settlement import SettledSet
from schemas.clients import consumer_config
from schemas.codec import decode
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, GroupstreamError, OffsetsLost
from schemas.identity import initial_watermark, task_of
from schemas.kafka_errors import PASSING
from schemas.records import EventKind, GroupEvent, Manifest
from schemas.topics import Topics

STEP_S = 5.0
AGAIN_S = 0.05
SHOWN_TASKS = 20

Waiting = Callable[[str], None]  # told for what, at every try


class Patience(NamedTuple):
    """Until when one and the same question is asked again."""

    end_s: float  # monotonic
    waiting: Waiting

    def again(self, problem: KafkaError, what: str) -> None:
        """Raises GroupstreamError where another try is of no use, DeadlineExceeded."""
        if not (problem.retriable() or problem.code() in PASSING):
            raise GroupstreamError(f"could not read {what}: {problem.str()}")
        if time.monotonic() > self.end_s:
            raise DeadlineExceeded(
                f"could not read {what} in time: {problem.str()}: does the broker answer, and "
                "does an unfinished transaction of another process end?"
            )
        self.waiting(f"{what} ({problem.str()})")
        time.sleep(AGAIN_S)


class Committed(NamedTuple):
    partition: int
    offset: int
    settled: SettledSet
    seen: int


class CommittedState:
    """`deadline_s` covers the transaction timeout: a hung transaction hides the offsets so long."""

    def __init__(
        self, kafka: KafkaConfig, topics: Topics, manifest: Manifest, waiting: Waiting
    ) -> None:
        self._kafka = kafka
        self._waiting = waiting
        self._topics = topics
        self._manifest = manifest
        self._deadline_s = 60.0 + kafka.transaction_timeout_ms / 1000

    def read(self, consumer: Consumer, numbers: list[int]) -> list[Committed]:
        """Raises OffsetsLost, MetadataUnreadable, DeadlineExceeded."""
        asked = [TopicPartition(self._topics.rows, number) for number in numbers]
        patience = Patience(time.monotonic() + self._deadline_s, self._waiting)
        found = _offsets(consumer, asked, patience)
        return [self._one(consumer, place, patience) for place in found]

    def _one(self, consumer: Consumer, found: TopicPartition, patience: Patience) -> Committed:
        low, high = _watermarks(consumer, found, patience)
        if found.offset == OFFSET_INVALID:
            self._require_untouched(found.partition, low, patience)
            start = initial_watermark(
                found.partition, self._manifest.num_partitions, self._manifest.first_task_index
            )
            return Committed(found.partition, 0, SettledSet(start), 0)
        settled, seen = SettledSet.decode(found.metadata or "")
        if not low <= found.offset <= high:
            raise OffsetsLost(
                f"{self._where(found.partition)}: committed offset {found.offset} is outside "
                f"{low}..{high}, what the topic still has. {self._unsettled(found, settled)} "
                "Retention or a deletion took their rows: raise retention.ms of the topic, and "
                "start a new run from the last checkpoint"
            )
        return Committed(found.partition, found.offset, settled, seen)

    def _require_untouched(self, number: int, low: int, patience: Patience) -> None:
        """Raises OffsetsLost where a partition without a commit has a past."""
        if low > 0:
            raise OffsetsLost(
                f"{self._where(number)} has no committed offset, and begins at offset {low}: what "
                "was below is lost with its tasks; start a new run from the last checkpoint"
            )
        kinds = (EventKind.ACCEPTED, EventKind.ABANDONED)
        events, first = _events(self._kafka, self._topics, number, patience)
        tasks = [event.task_index for event in events if event.kind in kinds]
        if tasks or first > 0:
            raise OffsetsLost(
                f"{self._where(number)} has no committed offset, but `events` begins at offset "
                f"{first} and has settled tasks {_shown(sorted(tasks))}: the offsets of group "
                f"{self._topics.assembler_group} were deleted or have expired, and beginning again "
                "would train these tasks twice; start a new run from the last checkpoint"
            )

    def _unsettled(self, found: TopicPartition, settled: SettledSet) -> str:
        partitions = self._manifest.num_partitions
        holes = [n for n in range(settled.watermark, settled.end) if n not in settled]
        tasks = [task_of(ordinal, found.partition, partitions) for ordinal in holes]
        above = task_of(settled.end, found.partition, partitions)
        return f"Unsettled: tasks {_shown(tasks)} and all from {above} on."

    def _where(self, number: int) -> str:
        return f"partition {number} of {self._topics.rows}"


def _named(places: list[TopicPartition]) -> str:
    return f"{places[0].topic}, partitions {[place.partition for place in places]}"


def _shown(tasks: list[int]) -> str:
    more = f" and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else ""
    return f"{tasks[:SHOWN_TASKS]}{more}"


def _offsets(
    consumer: Consumer, asked: list[TopicPartition], patience: Patience
) -> list[TopicPartition]:
    """Committed offsets; waits while a transaction that may still change them is open."""
    while True:
        problem: KafkaError | None = None
        try:
            found = consumer.committed(asked, timeout=STEP_S)
            problem = next((p.error for p in found if p.error is not None), None)
            if problem is None:
                return list(found)
        except KafkaException as error:
            problem = error.args[0]
        patience.again(problem, f"committed offsets of {_named(asked)}")


def _watermarks(
    consumer: Consumer, partition: TopicPartition, patience: Patience
) -> tuple[int, int]:
    while True:
        try:
            low, high = consumer.get_watermark_offsets(partition, timeout=STEP_S)
            return int(low), int(high)
        except KafkaException as error:
            patience.again(error.args[0], f"the offsets of {_named([partition])}")


def _events(
    kafka: KafkaConfig, topics: Topics, number: int, patience: Patience
) -> tuple[list[GroupEvent], int]:
    """The committed events of a partition, and the offset at which it begins."""
    settings = consumer_config(kafka, f"{topics.run_id}.assembler.events")
    consumer = Consumer(settings | {"enable.partition.eof": True, "auto.offset.reset": "earliest"})
    events: list[GroupEvent] = []
    partition = TopicPartition(topics.events, number, 0)
    try:
        first, _ = _watermarks(consumer, partition, patience)
        consumer.assign([partition])
        while time.monotonic() < patience.end_s:
            message = consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is None:
                record = decode(message.value())
                events += [record] if isinstance(record, GroupEvent) else []
            elif error.code() == KafkaError._PARTITION_EOF:
                return events, first
            elif not (error.retriable() or error.code() in PASSING):
                raise GroupstreamError(f"could not read {topics.events}: {error.str()}")
    finally:
        consumer.close()
    raise DeadlineExceeded(f"{topics.events} partition {number} was not read to its end in time")
