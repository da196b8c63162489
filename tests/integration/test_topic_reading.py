"""Everything that is committed is read, and nothing else."""

from contextlib import closing

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from infra.topic_creation import create_topics
from infra.topic_reading import PartitionReader
from schemas.clients import producer_config
from schemas.config import KafkaConfig
from schemas.topics import TopicSpec

RECORDS = 3000  # several batches, so that a record of each kind is the first of one


def test_reads_tombstones_and_skips_what_was_aborted(broker, run_id):
    kafka = KafkaConfig(bootstrap_servers=broker.bootstrap_servers)
    create_topics(
        AdminClient({"bootstrap.servers": broker.bootstrap_servers}),
        [TopicSpec(run_id, 1, {})],
        replication_factor=1,
    )
    producer = Producer(producer_config(kafka, "test", run_id))
    producer.init_transactions(30)
    for first in range(0, RECORDS, 30):
        for ends in (producer.abort_transaction, producer.commit_transaction):
            producer.begin_transaction()
            for number in range(first, first + 30):
                value = None if number % 3 else b"value"
                producer.produce(run_id, value, f"{number} {ends.__name__}".encode(), partition=0)
            # Or the broker may not know the transaction yet that it is to abort.
            assert producer.flush(30) == 0
            ends(30)
    with closing(PartitionReader(kafka, "test")) as reader:
        keys = [message.key().decode() for message in reader.read(run_id, 0)]
        assert list(reader.read(run_id, 0)) != []  # again, from the beginning
    assert keys == [f"{number} commit_transaction" for number in range(RECORDS)]
