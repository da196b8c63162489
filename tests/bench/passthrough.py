"""The baseline: the same bytes from `rows` to another topic, in transactions, with nothing between.

python -m tests.bench.passthrough CONFIG reads like the assembler, writes like it, commits its
offsets in the same transactions, and ends when it is told to.
"""

import signal
import sys
import threading
import time

from confluent_kafka import Consumer, Producer, TopicPartition

from schemas.clients import consumer_config, producer_config
from schemas.config import Config
from schemas.config_file import load_config
from schemas.topics import Topics

COMMIT_EVERY_S = 0.1
BATCH = 500


def pass_through(config: Config, stop: threading.Event) -> None:
    topics = Topics(config.run.id)
    consumer = Consumer(consumer_config(config.kafka, "passthrough", topics.assembler_group))
    producer = Producer(
        producer_config(config.kafka, "passthrough", topics.transactional_id("passthrough"))
    )
    producer.init_transactions(30)
    partitions = range(config.kafka.num_partitions)
    consumer.assign([TopicPartition(topics.rows, p, 0) for p in partitions])
    positions: dict[int, int] = {}
    began_s = 0.0
    while not stop.is_set():
        first = consumer.poll(0.1)
        messages = [] if first is None else [first, *consumer.consume(BATCH - 1, 0)]
        if messages and not began_s:
            producer.begin_transaction()
            began_s = time.monotonic()
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(message.error())
            producer.produce(
                topics.groups, message.value(), message.key(), partition=message.partition()
            )
            positions[message.partition()] = message.offset() + 1
        if began_s and (not messages or time.monotonic() - began_s > COMMIT_EVERY_S):
            offsets = [TopicPartition(topics.rows, p, o) for p, o in positions.items()]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
            producer.commit_transaction(30)
            began_s = 0.0
    consumer.close()


if __name__ == "__main__":
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    pass_through(load_config(sys.argv[1]), stopped)
