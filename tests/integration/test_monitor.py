"""The monitor reads a run from a real broker."""

import subprocess
import sys
import urllib.request

import orjson
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from consumers.settlement import SettledSet
from infra.broker.ports import free_port
from infra.init import init_run
from infra.monitor.collect import Collector
from infra.monitor.prometheus import serve
from schemas.clients import consumer_config, producer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.errors import ManifestMismatch
from schemas.records import PolicyVersion
from schemas.status import reported
from schemas.topics import CONTROL_POLICY, Topics


@pytest.fixture
def config(broker, run_id, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    return Config.model_validate(
        {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers, "num_partitions": 2},
            "data": {"train_jsonl_fpath": str(prompts)},
            "policy": {"model_name": "none"},
            "env": {"agents": {"sums": {"gym": "a:B"}}},
        }
    )


def flush_like_an_assembler(config, partition, *, rows, committed, seen, settled):
    """`rows` records, a dead letter, and a commit, in one transaction."""
    topics = Topics(config.run.id)
    producer = Producer(producer_config(config.kafka, "test", f"{config.run.id}.test"))
    consumer = Consumer(consumer_config(config.kafka, "test", topics.assembler_group))
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(rows):
        producer.produce(topics.rows, str(number).encode(), partition=partition)
    producer.produce(topics.dlq, b"bad", partition=partition)
    tasks = SettledSet()
    for ordinal in settled:
        tasks.add(ordinal)
    place = TopicPartition(topics.rows, partition, committed, tasks.encode(seen))
    producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), 30)
    producer.commit_transaction(30)
    consumer.close()


def announce(config, version):
    producer = Producer(producer_config(config.kafka, "test"))
    record = PolicyVersion(version=version, weights_dir="w", published_at_ms=1)
    producer.produce(Topics(config.run.id).control, encode(record), CONTROL_POLICY.encode())
    assert producer.flush(20) == 0


def test_a_run_that_does_not_exist(config):
    init_run(config)
    other = config.model_copy(update={"run": config.run.model_copy(update={"id": "nobody"})})
    with pytest.raises(ManifestMismatch, match=r"nobody\.control does not exist"):
        Collector(other)


def test_a_fresh_run_has_read_nothing(config):
    init_run(config)
    with Collector(config) as collector:
        snapshot = collector.snapshot()
    assert (snapshot.state, snapshot.step, snapshot.unread) == ("running", 0, 0)
    assert [line.partition for line in snapshot.partitions] == [0, 1]
    assert snapshot.roles == []


def test_what_is_unread_held_and_settled(config):
    init_run(config)
    flush_like_an_assembler(config, 1, rows=8, committed=2, seen=5, settled=[0, 1, 3])
    announce(config, 4)
    with (
        reported(config.kafka, Topics(config.run.id), "dispatcher", "0") as dispatcher,
        reported(config.kafka, Topics(config.run.id), "assembler", "a") as assembler,
    ):
        dispatcher.counters |= {"accepted": 3, "dispatched": 7, "outstanding": 4}
        assembler.counters |= {"groups_open": 2, "groups_held": 1}
        assembler.turn("waiting for rows")
    with Collector(config) as collector:
        snapshot = collector.snapshot()
    line = snapshot.partitions[1]
    assert (line.committed, line.position, line.end) == (2, 5, 9)  # 8 rows and a commit marker
    assert (line.unread, line.held) == (4, 3)
    assert (line.settled_tasks, line.settled_above, line.dead_letters) == (3, 1, 1)
    assert snapshot.partitions[0].unread == 0
    assert (snapshot.step, snapshot.groups_accepted, snapshot.dispatched) == (4, 3, 7)
    assert {(role.role, role.doing) for role in snapshot.roles} == {
        ("dispatcher", "ended"),
        ("assembler", "ended"),
    }
    assert snapshot.open_groups == 0  # an ended assembler holds nothing


def test_the_command_prints_one_object(config, tmp_path):
    init_run(config)
    config_file = tmp_path / "run.yaml"
    config_file.write_text(orjson.dumps(config.model_dump(exclude_defaults=True)).decode())
    command = [sys.executable, "-m", "infra.cli.monitor", "--config", str(config_file)]
    result = subprocess.run(
        [*command, "--json", "--once"], capture_output=True, timeout=120, check=True
    )
    (line,) = result.stdout.splitlines()
    assert orjson.loads(line)["run_id"] == config.run.id


def test_prometheus_serves_the_newest_snapshot(config):
    init_run(config)
    announce(config, 2)
    port = free_port()
    exporter = serve(port)
    with Collector(config) as collector:
        exporter.show(collector.snapshot())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert f'groupstream_step{{run="{config.run.id}"}} 2.0' in text
    assert f'groupstream_partition_unread{{partition="1",run="{config.run.id}"}} 0.0' in text


def test_another_configuration_is_refused(config):
    init_run(config)
    grpo = config.grpo.model_copy(update={"num_generations_per_prompt": 3})
    with pytest.raises(ManifestMismatch, match="num_generations_per_prompt"):
        Collector(config.model_copy(update={"grpo": grpo}))
