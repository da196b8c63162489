"""One Kafka transaction after the other: groups, events, dead letters and offsets, or nothing.

Every error of the producer becomes one of three answers: try the same call again for a while,
void (abort, and read the committed state again), or fenced (this process ends). A producer that
does not even abort is given up for a new one, whose init_transactions ends the old transaction.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from consumers.decisions import CommitPoint
from schemas.clients import consumer_config, producer_config
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced
from schemas.kafka_errors import FENCED
from schemas.settling import settle

CONNECT_S = 120.0  # a broker may be away for a minute
LEAST_PATIENCE_S = 10.0
ABORT_S = 10.0
STEP_S = 5.0  # of one blocking call
FULL_QUEUE_STEP_S = 0.05
REFUSAL_S = 0.1  # until the client tells why it refused a record

Waiting = Callable[[str], None]

log = logging.getLogger(__name__)


class Void(Exception):
    """Nothing of the open transaction counts; it must be aborted.

    `may_pass`: the broker was away or busy, and the same transaction could have succeeded.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Writes(NamedTuple):
    """Every (topic, partition) that is ever written, and an offset that the group commits."""

    places: list[tuple[str, int]]
    group_id: str
    offset: TopicPartition


class Transactions:
    """`opened_s` is the monotonic time of the open transaction's first record, else None."""

    def __init__(
        self, kafka: KafkaConfig, client_id: str, transactional_id: str, waiting: Waiting
    ) -> None:
        """Fences the predecessor and ends its transaction. Raises Fenced, DeadlineExceeded.

        `waiting` is told for what, at every try of a call that takes long.
        """
        self.opened_s: float | None = None
        self.carries_groups = False
        self.committed = 0
        self._id = transactional_id
        self._settings = producer_config(kafka, client_id, transactional_id) | {
            "delivery.report.only.error": True
        }
        self._kafka = kafka
        self._waiting = waiting
        self._writes: Writes | None = None
        self._refusal = ""  # of the open transaction's first record that was not taken
        # The broker ends a transaction that is older, so trying for longer can't save it.
        self._patience_s = max(LEAST_PATIENCE_S, kafka.transaction_timeout_ms / 1000)
        self._producer = self._connected()

    def settle(self, writes: Writes) -> None:
        """Ends what the broker forgot of a predecessor's transaction; before anything is read.

        Raises Fenced, DeadlineExceeded.
        """
        self._writes = writes
        self._settle(self._producer, writes)

    def produce(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None = None,
    ) -> None:
        """Raises Void, Fenced."""
        self._open()
        end = time.monotonic() + self._patience_s
        while True:
            try:
                self._producer.produce(
                    topic,
                    value,
                    key,
                    partition,
                    headers=headers or [],
                    on_delivery=self._note_refusal,
                )
                return
            except BufferError as error:
                if time.monotonic() > end:
                    raise Void(
                        f"the producer's queue stayed full for {self._patience_s:.0f} s",
                        may_pass=True,
                    ) from error
                self._waiting("room in the producer's queue")
                self._producer.poll(FULL_QUEUE_STEP_S)
            except KafkaException as error:
                raise self._unproduced(error) from error

    def commit(
        self,
        topic: str,
        points: Sequence[CommitPoint],
        consumer: Consumer,
        deadline_s: float | None = None,
    ) -> None:
        """Offsets and metadata of `topic` join the open transaction, which is committed.

        Raises Fenced, and Void: then a later init_transactions or abort decides, and only the
        committed offsets say how.
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
        patience_s = self._patience_s if deadline_s is None else deadline_s
        self._until_done(
            "send_offsets_to_transaction",
            lambda timeout_s: self._producer.send_offsets_to_transaction(offsets, group, timeout_s),
            patience_s,
        )
        self._until_done("commit_transaction", self._producer.commit_transaction, patience_s)
        self.opened_s, self.carries_groups = None, False
        self.committed += 1

    def abort(self) -> None:
        """Nothing where none is open. Raises Fenced, DeadlineExceeded."""
        if self.opened_s is not None:
            try:
                self._until_done("abort_transaction", self._producer.abort_transaction, ABORT_S)
            except (Void, KafkaException) as error:
                log.warning("%s can't abort, going on with a new producer: %s", self._id, error)
                old, self._producer = self._producer, self._connected()
                self._give_up(old)
        self.opened_s, self.carries_groups = None, False

    def close(self, deadline_s: float) -> None:
        """Aborts what is open, or leaves that to the broker."""
        try:
            if self.opened_s is not None:
                self._until_done("abort_transaction", self._producer.abort_transaction, deadline_s)
        except (Void, Fenced, KafkaException) as error:
            log.warning("%s: the broker will end the open transaction: %s", self._id, error)
        self.opened_s, self.carries_groups = None, False  # partitions may be lost while we leave
        self._give_up(self._producer)

    def _connected(self) -> Producer:
        producer = Producer(self._settings)
        try:
            self._until_done("init_transactions", producer.init_transactions, CONNECT_S)
        except Void as error:
            self._give_up(producer)
            raise DeadlineExceeded(
                f"{self._id}: {error}: does the broker answer, and does it allow "
                f"transaction.timeout.ms = {self._settings['transaction.timeout.ms']}?"
            ) from error
        if self._writes is not None:
            self._settle(producer, self._writes)
        return producer

    def _settle(self, producer: Producer, writes: Writes) -> None:
        """Ends what the broker forgot of a predecessor's transaction."""
        with closing(
            Consumer(consumer_config(self._kafka, f"{self._id}.settling", writes.group_id))
        ) as stranger:  # it never joins: the offset is nobody's, and never committed
            group = stranger.consumer_group_metadata()
            try:
                self._settled(producer, writes.places, writes.offset, group)
            except Void as error:  # a KIP-848 group with members takes no offset, but gets its end
                log.info("%s settles without an offset: %s", self._id, error)
                try:
                    self._until_done("abort_transaction", producer.abort_transaction, CONNECT_S)
                    self._settled(producer, writes.places)
                except Void as again:
                    raise DeadlineExceeded(
                        f"{self._id} can't end what a predecessor may have left open: {again}: "
                        "does the broker take records?"
                    ) from again

    def _settled(
        self,
        producer: Producer,
        places: list[tuple[str, int]],
        offset: TopicPartition | None = None,
        group: object = None,
    ) -> None:
        """Raises Void, Fenced."""
        try:
            settle(producer, places, self._patiently, offset, group)
        except KafkaException as error:
            raise self._classified("settling", error) from error

    def _patiently(self, name: str, call: Callable[[float], object]) -> None:
        self._until_done(name, call, CONNECT_S)

    def _give_up(self, producer: Producer) -> None:
        """What it still holds would be sent under an epoch that is over."""
        producer.purge()
        try:
            producer.close()
        except KafkaException as error:  # a fenced one says so once more, instead of ending
            log.warning("%s: the producer that was given up: %s", self._id, error)

    def _note_refusal(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and not self._refusal:
            self._refusal = f"{message.topic()} took no record: {error.str()}"

    def _unproduced(self, error: KafkaException) -> Exception:
        """The reason may come after the refusal: of an earlier record, or that we are fenced."""
        try:
            self._producer.poll(REFUSAL_S)
        except KafkaException as reason:
            error = reason
        return self._classified("produce", error)

    def _open(self) -> None:
        if self.opened_s is None:
            self._refusal = ""
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self._classified("begin_transaction", error) from error
            self.opened_s = time.monotonic()

    def _until_done(self, name: str, call: Callable[[float], object], patience_s: float) -> None:
        """Raises Void, at the latest after `patience_s`, Fenced, KafkaException."""
        end = time.monotonic() + patience_s
        while True:
            try:
                call(min(STEP_S, patience_s))
                return
            except KafkaException as error:
                failure = self._classified(name, error)
                if not (isinstance(failure, Void) and error.args[0].retriable()):
                    raise failure from error
                if time.monotonic() > end:
                    raise Void(
                        f"{name} did not end within {patience_s:.0f} s ({error.args[0].str()})",
                        may_pass=True,
                    ) from error
                self._waiting(f"the broker: {name} ({error.args[0].str()})")
                log.warning("%s, trying again: %s", self._id, failure)

    def _classified(self, name: str, error: KafkaException) -> Exception:
        cause: KafkaError = error.args[0]
        if cause.code() in FENCED:
            return Fenced(
                f"{self._id}: {name}: {cause.str()}: a newer process of this instance took over, "
                "or the broker ended a transaction that was open for too long"
            )
        refusal = f" ({self._refusal})" if self._refusal else ""
        return error if cause.fatal() else Void(f"{name}: {cause.str()}{refusal}")
