"""Reads everything that is committed in a partition, once."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas.clients import consumer_config
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded

DEADLINE_S = 300.0
BATCH = 1000


class Span(NamedTuple):
    """Offsets that a partition still has: from `first` up to, without, `end`."""

    first: int
    end: int


class PartitionReader:
    """One consumer for one topic after the other. One thread; a context manager by closing()."""

    def __init__(self, kafka: KafkaConfig, client_id: str) -> None:
        settings: dict[str, Any] = consumer_config(kafka, client_id)
        # What is asked meanwhile waits behind a fetch, and the end of a topic is one that is empty.
        brief = {"enable.partition.eof": True, "fetch.wait.max.ms": 10}
        self._consumer = Consumer(settings | brief)

    def span(self, topic: str, partition: int) -> Span:
        """`end` is the last stable offset: nothing below it is undecided."""
        place = TopicPartition(topic, partition)
        low, high = self._consumer.get_watermark_offsets(place, timeout=DEADLINE_S)
        return Span(low, high)

    def read(
        self, topic: str, partition: int, first: int = 0, end: int | None = None
    ) -> Iterator[Any]:
        """Committed messages, in order, of the span at the time of the call.

        Not those below `first`. With `end`, an offset that is written, on to there: a transaction
        that is open below it is waited for.
        Raises DeadlineExceeded when DEADLINE_S pass without a record, KafkaException.
        """
        span = self.span(topic, partition)
        first, end = max(first, span.first), span.end if end is None else end
        if first >= end:
            return
        self._consumer.assign([TopicPartition(topic, partition, first)])
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            polled = self._consumer.poll(0.1)
            if polled is None:  # not falsy: a tombstone has length 0
                continue
            if polled.error() is None:
                deadline = time.monotonic() + DEADLINE_S
            for message in [polled, *self._consumer.consume(BATCH, 0)]:
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if message.offset() < end and error is None:
                    yield message
                elif message.offset() >= end:
                    return
        raise DeadlineExceeded(
            f"{topic} [{partition}] was not read from {first} to {end}: nothing came for "
            f"{DEADLINE_S:.0f} s; does the broker answer?"
        )

    def close(self) -> None:
        self._consumer.close()
