"""Follows the `status` topic: the newest heartbeats of every process."""

import logging

from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.clients import consumer_config
from schemas.codec import decode_as
from schemas.config import KafkaConfig
from schemas.errors import RecordUnreadable
from schemas.records import Heartbeat
from schemas.topics import Topics

FEW = 500  # records a poll: the screen's thread also draws

log = logging.getLogger(__name__)


class StatusLog:
    """From the topic's beginning. One thread."""

    def __init__(self, kafka: KafkaConfig, topics: Topics, client_id: str) -> None:
        settings = consumer_config(kafka, f"{client_id}.status")
        self._consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
        self._consumer.assign([TopicPartition(topics.status, 0, 0)])

    def poll(self, timeout_s: float = 0.0) -> list[Heartbeat]:
        """What has arrived, waiting `timeout_s` for the first."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        found = []
        for message in [first, *self._consumer.consume(FEW, 0)]:
            if message.error() is not None:
                if message.error().fatal():
                    raise KafkaException(message.error())
                continue
            try:
                found.append(decode_as(message.value(), Heartbeat))
            except RecordUnreadable as error:
                log.warning("a heartbeat of another version is not shown: %s", error)
        return found

    def close(self) -> None:
        self._consumer.close()
