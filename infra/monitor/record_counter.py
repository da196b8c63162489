"""How many dead letters the partitions of `dlq` have: offsets also count commit markers."""

import time
from collections import Counter

from confluent_kafka import Consumer, TopicPartition

from infra.inspection.letters import is_mark
from schemas.clients import consumer_config
from schemas.config import KafkaConfig

SLICE_S = 2.0  # of a large topic, the rest is counted the next time
BATCH = 500


class LetterCounter:
    """Follows `dlq` from its beginning; marks of resolved letters do not count. One thread."""

    def __init__(self, kafka: KafkaConfig, topic: str, partitions: int) -> None:
        self._counts: Counter[int] = Counter()
        self._ends: set[int] = set()
        self._partitions = range(partitions)
        settings = consumer_config(kafka, f"{topic}.counter")
        small = {"queued.max.messages.kbytes": 4096, "enable.partition.eof": True}
        self._consumer = Consumer(settings | small | {"auto.offset.reset": "earliest"})
        self._consumer.assign([TopicPartition(topic, number, 0) for number in self._partitions])

    def counts(self) -> dict[int, int]:
        """By partition, up to the ends or as many as SLICE_S allows."""
        deadline = time.monotonic() + SLICE_S
        while time.monotonic() < deadline:
            # an end is told once: afterwards what is new arrives without being waited for
            messages = self._consumer.consume(BATCH, 0.1 if self._at_first() else 0)
            for message in messages:
                if message.error() is not None:
                    self._ends.add(message.partition())
                elif not is_mark(message.headers()):
                    self._counts[message.partition()] += 1
            if not messages and not self._at_first():
                break
        return {number: self._counts[number] for number in self._partitions}

    def close(self) -> None:
        self._consumer.close()

    def _at_first(self) -> bool:
        return len(self._ends) < len(self._partitions)
