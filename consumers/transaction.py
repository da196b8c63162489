"""One Kafka transaction after the other: groups, events, dead letters and offsets, or nothing.

Every error of the producer becomes one of three answers: try the same call again until its
deadline, void (abort, and read the committed state again), or fenced (this process ends).
"""

import logging
import time
from collections.abc import Callable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from consumers.decisions import CommitPoint
from schemas.clients import producer_config
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced

DEADLINE_S = 120.0  # a broker may be away for a minute
STEP_S = 5.0  # of one blocking call
FULL_QUEUE_STEP_S = 0.05
FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)

log = logging.getLogger(__name__)


class Void(Exception):
    """Nothing of the open transaction counts; it must be aborted."""


class Transactions:
    """`opened_s` is the monotonic time of the open transaction's first record, else None."""

    def __init__(self, kafka: KafkaConfig, client_id: str, transactional_id: str) -> None:
        """Fences the predecessor and ends its transaction. Raises Fenced, DeadlineExceeded."""
        self.opened_s: float | None = None
        self.carries_groups = False
        self.committed = 0
        self._id = transactional_id
        self._producer = Producer(producer_config(kafka, client_id, transactional_id))
        self._until_done("init_transactions", self._producer.init_transactions)

    def produce(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None = None,
    ) -> None:
        """Raises Void, Fenced, DeadlineExceeded."""
        self._open()
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=headers or [])
                return
            except BufferError as error:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"{self._id}: the producer's queue stayed full for {DEADLINE_S:.0f} s: "
                        "does the broker answer?"
                    ) from error
                self._producer.poll(FULL_QUEUE_STEP_S)
            except KafkaException as error:
                raise self._classified("produce", error) from error

    def commit(
        self,
        topic: str,
        points: Sequence[CommitPoint],
        consumer: Consumer,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Offsets and metadata of `topic` join the open transaction, which is committed.

        Raises Void, Fenced; DeadlineExceeded where the outcome is not known: a restart reads it.
        """
        self._open()
        offsets = [
            TopicPartition(topic, point.partition, point.offset, metadata=point.metadata)
            for point in points
        ]
        try:
            group = consumer.consumer_group_metadata()
        except KafkaException as error:
            raise self._classified("consumer_group_metadata", error) from error
        self._until_done(
            "send_offsets_to_transaction",
            lambda timeout_s: self._producer.send_offsets_to_transaction(offsets, group, timeout_s),
            deadline_s,
        )
        self._until_done("commit_transaction", self._producer.commit_transaction, deadline_s)
        self.opened_s, self.carries_groups = None, False
        self.committed += 1

    def abort(self, deadline_s: float = DEADLINE_S) -> None:
        """Nothing where none is open. Raises Fenced, DeadlineExceeded."""
        if self.opened_s is not None:
            try:
                self._until_done("abort_transaction", self._producer.abort_transaction, deadline_s)
            except Void as error:
                raise DeadlineExceeded(f"{self._id} could not abort: {error}") from error
        self.opened_s, self.carries_groups = None, False

    def close(self, deadline_s: float) -> None:
        """Aborts what is open. Raises as abort() does; then the broker will end it."""
        self.abort(deadline_s)
        self._producer.close()

    def _open(self) -> None:
        if self.opened_s is None:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self._classified("begin_transaction", error) from error
            self.opened_s = time.monotonic()

    def _until_done(
        self, name: str, call: Callable[[float], object], deadline_s: float = DEADLINE_S
    ) -> None:
        end = time.monotonic() + deadline_s
        while True:
            try:
                call(min(STEP_S, deadline_s))
                return
            except KafkaException as error:
                failure = self._classified(name, error)
                if not (isinstance(failure, Void) and error.args[0].retriable()):
                    raise failure from error
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"{self._id}: {name} did not end within {deadline_s:.0f} s "
                        f"({error.args[0].str()}): does the broker answer?"
                    ) from error
                log.warning("%s, trying again: %s", self._id, failure)

    def _classified(self, name: str, error: KafkaException) -> Exception:
        cause: KafkaError = error.args[0]
        if cause.code() in FENCED:
            return Fenced(
                f"{self._id}: {name}: {cause.str()}: a newer process of this instance took over, "
                "or the broker ended a transaction that was open for too long"
            )
        return error if cause.fatal() else Void(f"{name}: {cause.str()}")
