"""Reads single rows again whose payload was let go, beside the main consumer and never blocking."""

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from consumers.admission import Incoming
from schemas.clients import consumer_config
from schemas.config import KafkaConfig
from schemas.errors import OffsetsLost
from schemas.topics import Topics

BATCH = 64
SCANNED = 512  # a nearer row is read on to; a farther one is jumped to
QUEUE_KIB = 16 * 1024


class Rereader:
    def __init__(self, kafka: KafkaConfig, topics: Topics, client_id: str) -> None:
        settings = consumer_config(kafka, f"{client_id}.reread")
        self._topic = topics.rows
        self._consumer = Consumer(
            settings
            | {
                "queued.max.messages.kbytes": QUEUE_KIB,
                "max.partition.fetch.bytes": 1024 * 1024,  # a larger record still comes, alone
            }
        )
        self._partition = -1
        self._next_offset = -1

    def read(self, wanted: list[tuple[int, int]]) -> list[Incoming]:
        """What has arrived of `wanted`: (partition, offset) of one partition, ascending.

        Raises OffsetsLost where the topic has lost one of them.
        """
        if not wanted:
            self._rest()
            return []
        self._go_to(*wanted[0])
        offsets = {offset for _, offset in wanted}
        found = []
        for message in self._consumer.consume(BATCH, 0):
            if message.error() is not None:
                self._raise_if_lost(message.error(), wanted[0])
                continue
            if self._next_offset <= wanted[0][1] < message.offset():
                raise OffsetsLost(
                    f"partition {self._partition} of {self._topic} has no offset {wanted[0][1]} "
                    "any more, and its row is not in a group yet: raise the topic's retention"
                )
            self._next_offset = message.offset() + 1
            if message.offset() in offsets:
                found.append(incoming_of(message))
                wanted = [place for place in wanted if place[1] > message.offset()]
            if not wanted:
                break
        return found

    def close(self) -> None:
        self._consumer.close()

    def _go_to(self, partition: int, offset: int) -> None:
        near = self._next_offset <= offset < self._next_offset + SCANNED
        if partition != self._partition or not near:
            self._consumer.assign([TopicPartition(self._topic, partition, offset)])
            self._partition, self._next_offset = partition, offset

    def _rest(self) -> None:
        if self._partition != -1:
            self._consumer.unassign()
            self._partition = self._next_offset = -1

    def _raise_if_lost(self, error: KafkaError, place: tuple[int, int]) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise OffsetsLost(
                f"offset {place[1]} of partition {place[0]} of {self._topic} is gone, and its row "
                f"is not in a group yet ({error.str()}): raise the topic's retention"
            )


def incoming_of(message: Message) -> Incoming:
    """A confluent_kafka.Message without an error."""
    return Incoming(message.partition(), message.offset(), message.key(), message.value())
