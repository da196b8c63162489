"""A real broker of our own: limits, restart, crash, reuse, and nothing left behind."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from infra.broker import Broker, start_broker, stop_leftover
from infra.broker.docker_engine import find_engine
from infra.broker.errors import AttemptFailed
from infra.broker.provision import WAYS, Way

MIB = 1 << 20
ANSWER_S = 60.0


def ways_here() -> list[Way]:
    """Java always; Docker where an engine runs."""
    docker, java = WAYS
    try:
        find_engine()
    except AttemptFailed:
        return [java]
    return [java, docker]


@pytest.fixture(scope="module", params=ways_here(), ids=lambda way: way.how)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp(way.how)
    with start_broker(directory, progress=print, ways=[way]) as running:
        assert running.how == way.how
        yield running


def create_topic(broker: Broker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    config = {"max.message.bytes": str(129 * MIB)}
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(ANSWER_S)


def produce(broker: Broker, topic: str, value: bytes) -> None:
    failures: list[KafkaError] = []
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "message.max.bytes": 200 * MIB,
            "queue.buffering.max.kbytes": 400 * 1024,
            "topic.metadata.propagation.max.ms": 1000,  # a missing topic is an error then
        }
    )
    producer.produce(topic, value, on_delivery=lambda error, _: error and failures.append(error))
    assert producer.flush(ANSWER_S) == 0
    if failures:
        raise KafkaException(failures[0])


def first_value(broker: Broker, topic: str) -> bytes:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "fetch.message.max.bytes": 160 * MIB,
            "fetch.max.bytes": 200 * MIB,
            "receive.message.max.bytes": 201 * MIB,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = consumer.poll(ANSWER_S)
    consumer.close()
    assert message is not None
    assert message.error() is None
    return message.value()


def directory_of(broker: Broker) -> Path:
    assert broker.log_path is not None
    return broker.log_path.parent


def processes_in(directory: Path) -> list[psutil.Process]:
    """The brokers that run in the directory, in containers too."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in part for part in process.info["cmdline"] or ())
        and "kafka.Kafka" in process.info["cmdline"]
    ]


def test_a_group_of_128_mib_passes_and_a_larger_record_is_refused(local: Broker):
    value = b"x" * (128 * MIB)
    create_topic(local, "groups")
    produce(local, "groups", value)
    assert first_value(local, "groups") == value
    with pytest.raises(KafkaException) as refusal:
        produce(local, "groups", b"x" * (130 * MIB))
    assert refusal.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE


def test_it_listens_on_127_0_0_1_alone_and_makes_no_topic_by_itself(local: Broker):
    [process] = processes_in(directory_of(local))
    listening = process.net_connections("tcp")
    addresses = {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    with pytest.raises(KafkaException):
        produce(local, "mistyped", b"value")


def test_a_record_of_20_mib_outlives_stop_and_kill(local: Broker):
    value = bytes(range(256)) * (20 * MIB // 256)
    servers = local.bootstrap_servers
    create_topic(local, "large")
    produce(local, "large", value)

    local.kill()
    assert (local.pid, local.container) == (None, None)
    assert processes_in(directory_of(local)) == []
    local.restart()
    assert local.bootstrap_servers == servers
    assert first_value(local, "large") == value

    local.stop()
    local.stop()
    assert processes_in(directory_of(local)) == []
    local.restart()
    assert first_value(local, "large") == value


def test_a_leftover_is_used_again_restarted_for_other_settings_and_stopped(
    tmp_path: Path, way: Way
):
    script = (
        "import os, sys, pathlib\n"
        "from infra.broker import start_broker\n"
        "from infra.broker.provision import WAYS\n"
        "ways = [way for way in WAYS if way.how == sys.argv[2]]\n"
        "broker = start_broker(pathlib.Path(sys.argv[1]), progress=str, ways=ways)\n"
        "print(broker.bootstrap_servers, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), way.how]
    died = subprocess.run(command, check=False, timeout=240, stdout=subprocess.PIPE, text=True)
    assert died.returncode == -signal.SIGKILL
    [process] = processes_in(tmp_path)

    again = start_broker(tmp_path, progress=print, ways=[way])
    assert processes_in(tmp_path) == [process]
    assert again.bootstrap_servers == died.stdout.strip()
    create_topic(again, "kept")

    smaller = start_broker(tmp_path, progress=print, ways=[way], record_bytes=MIB)
    assert process not in processes_in(tmp_path)
    assert smaller.bootstrap_servers == again.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": smaller.bootstrap_servers})
    assert "kept" in admin.list_topics(timeout=ANSWER_S).topics

    assert stop_leftover(tmp_path, print)
    assert processes_in(tmp_path) == []
    assert not stop_leftover(tmp_path, print)


def test_the_command_prints_where_it_listens_and_stops_on_sigterm(tmp_path: Path):
    command = [sys.executable, "-m", "infra.broker", "--directory", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["how"] in ("docker", "java")
        admin = AdminClient({"bootstrap.servers": answer["bootstrap_servers"]})
        assert len(admin.list_topics(timeout=ANSWER_S).brokers) == 1
        process.terminate()
        assert process.wait(ANSWER_S) == 0
    assert processes_in(tmp_path) == []
