"""A run's topics as the tools read them: control first, then each part that a picture needs."""

from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, NamedTuple, Self

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition

from consumers.settlement import SettledSet
from infra.init import connected_admin, control_state
from infra.inspection.errors import TopicUnreadable
from infra.inspection.stored import Place, Stored
from infra.topic_reading import PartitionReader, Span
from schemas.clients import consumer_config
from schemas.config import Config
from schemas.manifest import require_manifest
from schemas.offsets import ends
from schemas.topics import Topics

ANSWER_S = 30.0


class Commit(NamedTuple):
    """Of the assemblers, for one partition of `rows`. `seen`: the highest position committed.

    No unsettled task has a row below `offset`.
    """

    offset: int
    seen: int


class RunReader:
    """One thread; a context manager. Reads only, and joins no group."""

    def __init__(self, config: Config) -> None:
        """Raises DeadlineExceeded without a broker, ManifestMismatch without such a run."""
        self.config = config
        self.topics = Topics(config.run.id)
        self._admin = connected_admin(config)
        self.control = control_state(config)
        self.manifest = require_manifest(self.control, config)
        self._client_id = f"{config.run.id}.inspection"
        self._reader = PartitionReader(config.kafka, self._client_id)

    @property
    def partitions(self) -> range:
        return range(self.manifest.num_partitions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()

    def span(self, topic: str, partition: int) -> Span:
        """The offsets that there are. Raises TopicUnreadable."""
        try:
            return self._reader.span(topic, partition)
        except KafkaException as error:
            raise _unreadable(topic, partition, error) from error

    def read(self, topic: str, partition: int, first: int = 0) -> Iterator[Stored]:
        """What is committed now, from `first` on. Raises TopicUnreadable, DeadlineExceeded."""
        return self._read(topic, partition, first, None)

    def read_written(self, topic: str, partition: int) -> Iterator[Stored]:
        """What is committed of all that is written now.

        A transaction that is still open is waited for: what was committed after it began, by
        another producer, would be missed.
        """
        return self._read(topic, partition, 0, self._written_end(topic, partition))

    def commit(self, partition: int) -> Commit:
        """Zeros where none was made. Raises MetadataUnreadable, TopicUnreadable."""
        group, rows = self.topics.assembler_group, self.topics.rows
        settings = consumer_config(self.config.kafka, self._client_id, group)
        with closing(Consumer(settings)) as consumer:
            try:
                (found,) = consumer.committed([TopicPartition(rows, partition)], timeout=ANSWER_S)
            except KafkaException as error:
                raise _unreadable(f"the commits of {group}", partition, error) from error
        if found.error is not None:
            raise _unreadable(f"the commits of {group}", partition, KafkaException(found.error))
        if found.offset < 0:
            return Commit(0, 0)
        return Commit(found.offset, SettledSet.decode(found.metadata or "")[1])

    def _read(self, topic: str, partition: int, first: int, end: int | None) -> Iterator[Stored]:
        try:
            for message in self._reader.read(topic, partition, first, end):
                yield stored_of(message)
        except KafkaException as error:
            raise _unreadable(topic, partition, error) from error

    def _written_end(self, topic: str, partition: int) -> int:
        place = topic, partition
        try:
            return ends(self._admin, [place], IsolationLevel.READ_UNCOMMITTED, ANSWER_S)[place]
        except KafkaException as error:
            raise _unreadable(topic, partition, error) from error


def stored_of(message: Any) -> Stored:
    """A client's message, free of the client. Of two headers with one name the last counts."""
    headers = {name: value or b"" for name, value in message.headers() or ()}
    place = Place(message.partition(), message.offset())
    return Stored(place, message.timestamp()[1], message.key(), message.value(), headers)


def _unreadable(topic: str, partition: int, error: KafkaException) -> TopicUnreadable:
    return TopicUnreadable(
        f"{topic} partition {partition} could not be read: {error.args[0].str()}; does the broker "
        "answer? Where records were deleted in this moment, the next try begins after them"
    )
