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
        self._consumer = Consumer(settings | {"enable.partition.eof": True})

    def span(self, topic: str, partition: int) -> Span:
        """`end` is the last stable offset: nothing below it is undecided."""
        place = TopicPartition(topic, partition)
        low, high = self._consumer.get_watermark_offsets(place, timeout=DEADLINE_S)
        return Span(low, high)

    def read(self, topic: str, partition: int) -> Iterator[Any]:
        """Committed messages, in order, of the span at the time of the call.

        Raises DeadlineExceeded when DEADLINE_S pass without the end, KafkaException.
        """
        span = self.span(topic, partition)
        if span.first >= span.end:
            return
        self._consumer.assign([TopicPartition(topic, partition, span.first)])
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            first = self._consumer.poll(0.1)
            if first is None:  # not falsy: a tombstone has length 0
                continue
            for message in [first, *self._consumer.consume(BATCH, 0)]:
                error = message.error()
                if error is None:
                    yield message
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                elif message.offset() >= span.end:
                    return
        raise DeadlineExceeded(
            f"{topic} [{partition}] was not read from {span.first} to {span.end} within "
            f"{DEADLINE_S:.0f} s: does the broker answer?"
        )

    def close(self) -> None:
        self._consumer.close()
