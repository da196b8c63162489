"""A run on a real broker for tests: configuration, topics, `control` records, topic contents."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from schemas import topics as keys
from schemas.codec import encode
from schemas.config import Config
from schemas.config_file import parse_config
from schemas.identity import key_of, partition_of
from schemas.records import Finished, Manifest, PolicyVersion
from schemas.topics import Topics

ANSWER_S = 30.0


def make_config(bootstrap_servers: str, run_id: str, directory: Path, **kafka: Any) -> Config:
    """A whole configuration with one agent; `kafka` goes over the defaults of that section."""
    values = {
        "run": {"id": run_id, "directory": str(directory)},
        "kafka": {"bootstrap_servers": bootstrap_servers, "num_partitions": 2} | kafka,
        "data": {"train_jsonl_fpath": str(directory / "prompts.jsonl")},
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {"use_importance_sampling_correction": True},
        "policy": {"model_name": str(directory / "model")},
        "env": {"agents": {"sums": {"gym": "module:Gym"}}},
    }
    return parse_config(values, "tests")


def manifest_fields(config: Config) -> dict[str, Any]:
    """What make_manifest() needs so that `config` agrees with the run."""
    return {
        "run_id": config.run.id,
        "num_partitions": config.kafka.num_partitions,
        "num_prompts_per_step": config.grpo.num_prompts_per_step,
        "num_generations_per_prompt": config.grpo.num_generations_per_prompt,
        "lead": config.grpo.lead,
        "max_trajectory_age_steps": config.grpo.max_age,
        "shards": {name: shard.replicas for name, shard in config.all_shards.items()},
        "max_row_bytes": config.kafka.max_row_bytes,
        "max_group_bytes": config.kafka.max_group_bytes,
    }


def create_run(config: Config, manifest: Manifest, version: int | None = 0) -> Topics:
    """All topics and the manifest; `version` is announced unless None."""
    topics = Topics(config.run.id)
    specs = topics.specs(manifest.num_partitions, manifest.shards, config.kafka.limits)
    admin = AdminClient({"bootstrap.servers": config.kafka.bootstrap_servers})
    wanted = [NewTopic(s.name, s.partitions, 1, config=s.config) for s in specs]
    for made in admin.create_topics(wanted).values():
        made.result(ANSWER_S)
    control(config, keys.CONTROL_MANIFEST, encode(manifest))
    if version is not None:
        announce(config, version)
    return topics


def announce(config: Config, version: int) -> None:
    record = PolicyVersion(version=version, weights_dir=f"v{version}", published_at_ms=1)
    control(config, keys.CONTROL_POLICY, encode(record))


def finish(config: Config) -> None:
    control(config, keys.CONTROL_FINISHED, encode(Finished(step=1, at_ms=1)))


def control(config: Config, key: str, value: bytes | None) -> None:
    send(config, Topics(config.run.id).control, [(0, key.encode(), value)])


def send(
    config: Config,
    topic: str,
    records: Iterable[tuple[int, bytes | None, bytes | None]],
    compression: str = "none",
) -> None:
    """(partition, key, value) each; all are acknowledged when this returns."""
    failures: list[KafkaError] = []
    producer = Producer(
        {
            "bootstrap.servers": config.kafka.bootstrap_servers,
            "enable.idempotence": True,
            "message.max.bytes": config.kafka.limits.largest_message_bytes,
            "batch.size": 16_384,
            "linger.ms": 1,
            "compression.type": compression,
        }
    )
    for partition, key, value in records:
        producer.produce(
            topic,
            value,
            key,
            partition,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        producer.poll(0)
    assert producer.flush(ANSWER_S) == 0
    assert not failures, failures


def row_record(manifest: Manifest, task_index: int, value: bytes) -> tuple[int, bytes, bytes]:
    """A record of `rows` on its task's partition, for send()."""
    return partition_of(task_index, manifest.num_partitions), key_of(task_index), value


def read_topic(
    config: Config, topic: str, isolation: str = "read_committed", deadline_s: float = ANSWER_S
) -> list[Message]:
    """Everything in the topic, to the end of every partition, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": config.kafka.bootstrap_servers,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            "receive.message.max.bytes": max(config.kafka.limits.largest_message_bytes, 64 << 20)
            + (1 << 20),
        }
    )
    try:
        count = len(consumer.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions)
        open_partitions = set(range(count))
        consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
        messages = []
        end = time.monotonic() + deadline_s
        while open_partitions:
            assert time.monotonic() < end, f"{topic} was not read to its end"
            message = consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is None:
                messages.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
            else:
                raise AssertionError(message.error())
        return sorted(messages, key=lambda m: (m.partition(), m.offset()))
    finally:
        consumer.close()
