"""Rows and what belongs to them, on their way to `rows`: checked, encoded, sent at once.

        event loop                              poll thread
    send() ─ produce ─▶ librdkafka's queue ─▶  delivery reports
        ◀──── future resolved ─────────────────────┘

One idempotent producer: the records of a task stay in the order in which they were sent.
"""

import asyncio
import threading
import time
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, Producer

from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, GroupstreamError, RecordTooLarge
from schemas.identity import key_of, partition_of
from schemas.records import OfAttempt, RolloutRow
from schemas.topics import Topics
from schemas.validation import check_row

POLL_S = 0.05
FULL_QUEUE_RETRY_S = 0.01

Delivery = asyncio.Future[None]


class DeliveryFailed(GroupstreamError):
    """The broker did not take a record; nothing more can be said about its attempt from here."""


class RowSink:
    """The shard's one producer. Use it from one event loop; close it in the end."""

    def __init__(
        self, kafka: KafkaConfig, topics: Topics, num_partitions: int, client_id: str
    ) -> None:
        settings = producer_config(kafka, client_id)
        self._deadline_s = settings["delivery.timeout.ms"] / 1000
        self._topic = topics.rows
        self._partitions = num_partitions
        self._max_bytes = kafka.limits.row_bytes
        self._loop = asyncio.get_running_loop()
        self._producer = Producer(settings)
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="row-sink", daemon=True)
        self._poller.start()

    async def send(self, record: OfAttempt) -> Delivery:
        """Sends a record now; what is returned resolves when the broker has it.

        Raises RowRejected and RecordTooLarge before anything is sent, and DeliveryFailed; the
        returned future raises RecordTooLarge or DeliveryFailed.
        """
        if isinstance(record, RolloutRow):
            check_row(record)
        payload = encode(record)
        if len(payload) > self._max_bytes:
            raise _too_large(record, len(payload), f"kafka.max_row_bytes {self._max_bytes}")
        delivery: Delivery = self._loop.create_future()
        await self._produce(record, payload, partial(self._report, delivery, record, len(payload)))
        return delivery

    async def close(self, deadline_s: float) -> None:
        """Waits for what is under way. Raises DeadlineExceeded with the number of records left."""
        left = await asyncio.to_thread(self._producer.flush, deadline_s)
        self._closing.set()
        if left:
            raise DeadlineExceeded(
                f"{left} records for {self._topic} were not delivered within {deadline_s:g} s"
            )

    async def _produce(self, record: OfAttempt, payload: bytes, report: Any) -> None:
        ends_s = time.monotonic() + self._deadline_s
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    payload,
                    key_of(record.task_index),
                    partition=partition_of(record.task_index, self._partitions),
                    on_delivery=report,
                )
            except BufferError as error:
                if time.monotonic() > ends_s:
                    raise DeliveryFailed(
                        f"{_name(record)}: the producer's queue for {self._topic} stayed full for "
                        f"{self._deadline_s:g} s; does the broker answer?"
                    ) from error
                await asyncio.sleep(FULL_QUEUE_RETRY_S)
            else:
                return

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(POLL_S)

    def _report(
        self,
        delivery: Delivery,
        record: OfAttempt,
        size: int,
        error: KafkaError | None,
        _message: Any,
    ) -> None:
        """On the thread that polls or flushes."""
        failure: GroupstreamError | None = None
        if error is not None:
            failure = DeliveryFailed(f"{_name(record)} was not delivered to {self._topic}: {error}")
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                failure = _too_large(record, size, f"max.message.bytes of topic {self._topic}")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, delivery, failure)


def _resolve(delivery: Delivery, failure: GroupstreamError | None) -> None:
    if delivery.done():
        return
    if failure is None:
        delivery.set_result(None)
    else:
        delivery.set_exception(failure)


def _too_large(record: OfAttempt, size: int, limit: str) -> RecordTooLarge:
    return RecordTooLarge(
        f"{_name(record)} has {size} bytes, over the limit {limit}; raise kafka.max_row_bytes in a "
        "new run, or let the gym give less"
    )


def _name(record: OfAttempt) -> str:
    row = f" row {record.row_index}" if isinstance(record, RolloutRow) else ""
    return f"{type(record).__name__} of task {record.task_index} attempt {record.attempt}{row}"
