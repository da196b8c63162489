"""The dispatcher's two producers: one transaction a step, and requests after it."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced
from schemas.identity import key_of, partition_of
from schemas.kafka_errors import FENCED
from schemas.records import AttemptFailed, CancelRequested
from schemas.settling import settle

CALL_S = 5.0  # of one call to the broker; it is repeated until the deadline
FLUSH_S = 5.0

logger = logging.getLogger(__name__)


class Outgoing(NamedTuple):
    """A record on its way; `value` is None for a tombstone."""

    topic: str
    partition: int
    key: bytes
    value: bytes | None


class Aborted(Exception):
    """The transaction was aborted: nothing of it was written. Read the committed state again."""


class Transactions:
    """The transactional producer. Raises Fenced from any call once a newer process took over."""

    def __init__(self, kafka: KafkaConfig, client_id: str, transactional_id: str) -> None:
        self._id = transactional_id
        self._deadline_s = max(60.0, 2 * kafka.transaction_timeout_ms / 1000)
        self._producer = Producer(producer_config(kafka, client_id, transactional_id))

    def open(self) -> None:
        """Fences a predecessor: what it wrote and committed can be read from now on."""
        self._finish("init_transactions", lambda: self._producer.init_transactions(CALL_S))

    def settle(self, places: Sequence[tuple[str, int]], offset: TopicPartition, group: Any) -> None:
        """Ends what the broker forgot of a predecessor's transaction, in `places` and the group.

        Raises Fenced, DeadlineExceeded.
        """
        try:
            settle(self._producer, places, self._timed, offset, group)
        except KafkaException as failure:
            self._raise_if_fenced(failure)
            if failure.args[0].fatal():
                raise
            logger.warning("%s could not settle: %s", self._id, failure.args[0].str())
            self._finish("abort", lambda: self._producer.abort_transaction(CALL_S))

    def _timed(self, name: str, call: Callable[[float], Any]) -> None:
        self._finish(name, lambda: call(CALL_S))

    def commit(
        self, records: Sequence[Outgoing], offsets: Sequence[TopicPartition], group: Any
    ) -> None:
        """All or nothing. Raises Aborted, Fenced, DeadlineExceeded."""
        try:
            self._producer.begin_transaction()
            for record in records:
                self._produce(record)
            self._finish(
                "send_offsets",
                lambda: self._producer.send_offsets_to_transaction(list(offsets), group, CALL_S),
            )
            self._finish("commit", lambda: self._producer.commit_transaction(CALL_S))
        except KafkaException as failure:
            self._raise_if_fenced(failure)
            error = failure.args[0]
            if error.fatal():
                raise
            self._finish("abort", lambda: self._producer.abort_transaction(CALL_S))
            raise Aborted(error.str()) from failure

    def _produce(self, record: Outgoing) -> None:
        while True:
            try:
                self._producer.produce(
                    record.topic, record.value, record.key, partition=record.partition
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)

    def _finish(self, name: str, call: Callable[[], Any]) -> None:
        """Repeats what may be repeated: a broker that restarts answers later."""
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                call()
                return
            except KafkaException as failure:
                self._raise_if_fenced(failure)
                if not failure.args[0].retriable():
                    raise
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{name} of {self._id} did not end within {self._deadline_s:.0f} s "
                        f"({failure.args[0].str()}): does the broker answer?"
                    ) from failure

    def _raise_if_fenced(self, failure: KafkaException) -> None:
        if failure.args[0].code() in FENCED:
            raise Fenced(
                f"another process opened {self._id}, or this one was paused beyond its transaction "
                "timeout: it must end, the ledger has all that it did"
            ) from failure


class RequestWriter:
    """Requests to the assembler, on the `rows` partition of their task. They are idempotent, so
    one that failed to arrive is simply sent again."""

    def __init__(self, kafka: KafkaConfig, client_id: str, topic: str, num_partitions: int) -> None:
        self._topic = topic
        self._num_partitions = num_partitions
        self._producer = Producer(producer_config(kafka, client_id))
        self._undelivered: list[CancelRequested | AttemptFailed] = []

    def send(self, request: CancelRequested | AttemptFailed) -> None:
        self._producer.produce(
            self._topic,
            encode(request),
            key_of(request.task_index),
            partition=partition_of(request.task_index, self._num_partitions),
            on_delivery=partial(self._delivered, request),
        )

    def poll(self) -> None:
        self._producer.poll(0)
        again, self._undelivered = self._undelivered, []
        for request in again:
            self.send(request)

    def close(self) -> None:
        left = self._producer.flush(FLUSH_S)
        if left:
            logger.warning("%d requests did not leave; the next dispatcher asks again", left)

    def _delivered(
        self, request: CancelRequested | AttemptFailed, error: KafkaError | None, _: Any
    ) -> None:
        if error is not None:
            logger.warning("a request for task %d failed: %s", request.task_index, error.str())
            self._undelivered.append(request)
