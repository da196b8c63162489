"""Follows the partitions of one topic, read committed, from given offsets."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.clients import consumer_config
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, OffsetsLost
from schemas.kafka_errors import PASSING

LONGEST_POLL_S = 0.1
RETRY_S = 0.1
MOST_MESSAGES = 2000  # of one poll: a backlog must not keep the loop from everything else


class Tail:
    """One thread. `positions` are the offsets that poll() would give next, by partition."""

    def __init__(
        self, kafka: KafkaConfig, topic: str, client_id: str, group_id: str | None = None
    ) -> None:
        self.topic = topic
        self.positions: dict[int, int] = {}
        settings = consumer_config(kafka, client_id, group_id)
        self._consumer = Consumer(settings | {"enable.partition.eof": True})
        self._ended: dict[int, int] = {}

    def start(self, offsets: Mapping[int, int]) -> None:
        self.positions = dict(offsets)
        self._ended.clear()
        self._consumer.assign([TopicPartition(self.topic, p, o) for p, o in offsets.items()])

    def partitions(self, topic: str, deadline_s: float) -> int:
        """How many partitions `topic` has; 0 where it does not exist."""
        metadata = self._retried(lambda: self._consumer.list_topics(topic, timeout=10), deadline_s)
        return len(metadata.topics[topic].partitions)

    def committed(self, partitions: Sequence[int], deadline_s: float) -> dict[int, int | None]:
        """The group's committed offsets; None where there is none."""
        asked = [TopicPartition(self.topic, partition) for partition in partitions]
        found = self._retried(lambda: self._consumer.committed(asked, timeout=10), deadline_s)
        for partition in found:
            if partition.error is not None:
                raise KafkaException(partition.error)
        return {p.partition: p.offset if p.offset >= 0 else None for p in found}

    def group_metadata(self) -> Any:
        return self._consumer.consumer_group_metadata()

    def poll(self, timeout_s: float) -> Iterator[Message]:
        """What has arrived, waiting `timeout_s` for the first. Raises OffsetsLost."""
        wait_s = timeout_s
        for _ in range(MOST_MESSAGES):
            message = self._consumer.poll(wait_s)
            if message is None:
                return
            if self._is_record(message):
                wait_s = 0.0
                self.positions[message.partition()] = message.offset() + 1
                yield message

    def read_to_end(self, deadline_s: float) -> Iterator[Message]:
        """Everything that was committed when this was called. Raises DeadlineExceeded."""
        until = time.monotonic() + deadline_s
        ends = {partition: self._end(partition, deadline_s) for partition in self.positions}
        while behind := [p for p, end in ends.items() if not self._is_past(p, end)]:
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"partitions {behind} of {self.topic} were not read to their end within "
                    f"{deadline_s:.0f} s: does the broker answer, and does a hung transaction end?"
                )
            yield from self.poll(LONGEST_POLL_S)

    def close(self) -> None:
        self._consumer.close()

    def _is_past(self, partition: int, end: int) -> bool:
        return max(self.positions[partition], self._ended.get(partition, 0)) >= end

    def _end(self, partition: int, deadline_s: float) -> int:
        asked = TopicPartition(self.topic, partition)
        offsets = self._retried(
            lambda: self._consumer.get_watermark_offsets(asked, timeout=10), deadline_s
        )
        return int(offsets[1])

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._ended[message.partition()] = message.offset()
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetsLost(
                f"{self.topic}/{message.partition()}: offset "
                f"{self.positions.get(message.partition())} is gone: {error.str()}. Records were "
                "deleted before they were read; start a new run from the last checkpoint"
            )
        elif error.fatal() or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaException(error)
        return False

    def _retried(self, call: Any, deadline_s: float) -> Any:
        """Raises DeadlineExceeded."""
        until = time.monotonic() + deadline_s
        while True:
            try:
                return call()
            except KafkaException as error:
                if error.args[0].code() not in PASSING:
                    raise
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{self.topic}: no answer within {deadline_s:.0f} s "
                        f"({error.args[0].str()}): does the broker answer?"
                    ) from error
                time.sleep(RETRY_S)
