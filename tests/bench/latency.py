"""From the last row's acknowledgement to the group being readable, at a steady rate."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition

from schemas.clients import consumer_config, producer_config
from schemas.config import Config
from schemas.identity import key_of, partition_of
from schemas.records import Manifest
from schemas.topics import Topics
from tests.bench.assembly import assembler_command, config_file, running
from tests.bench.load import new_run, rows_of
from tests.bench.results import Result, percentile

TOKENS = 2048
WARM_UP = 40  # groups that are sent and not counted: joining the group, filling caches
DEADLINE_S = 60.0


def measure(
    bootstrap: str, directory: Path, *, groups: int, rate: float, say: Callable[[str], None]
) -> list[Result]:
    config, manifest = new_run(bootstrap, directory)
    log = directory / f"{config.run.id}.log"
    with running(assembler_command(config_file(config, directory)), log):
        waits_ms = _waits(config, manifest, groups + WARM_UP, 1 / rate)
    values = sorted(list(waits_ms.values())[WARM_UP:])
    say(f"latency: {len(values)} groups")
    name = f"last row acknowledged to group readable, {rate:.0f} groups/s"
    return [
        Result(f"{name}, p{percent}", percentile(values, percent), "ms") for percent in (50, 99)
    ]


def _waits(config: Config, manifest: Manifest, groups: int, period_s: float) -> dict[int, float]:
    """Milliseconds by task, in the order of the tasks."""
    topics = Topics(config.run.id)
    acknowledged: dict[int, float] = {}
    readable: dict[int, float] = {}
    read = threading.Thread(target=_read, args=(config, topics, groups, readable))
    read.start()
    producer = Producer(producer_config(config.kafka, "bench") | {"linger.ms": 0})

    def send(task_index: int) -> None:
        def acknowledge(error: object, _message: object) -> None:
            if error is not None:
                raise RuntimeError(error)
            acknowledged[task_index] = time.monotonic()  # the last row's comes last

        for payload in rows_of(manifest, task_index, TOKENS):
            producer.produce(
                topics.rows,
                payload,
                key_of(task_index),
                partition=partition_of(task_index, manifest.num_partitions),
                on_delivery=acknowledge,
            )
        producer.flush(30)

    begin_s = time.monotonic()
    for task_index in range(groups):
        if task_index == WARM_UP:
            _wait_until(lambda: len(readable) == WARM_UP)
            begin_s = time.monotonic() - WARM_UP * period_s
        while (left_s := begin_s + task_index * period_s - time.monotonic()) > 0:
            producer.poll(left_s)
        send(task_index)
    read.join(DEADLINE_S)
    missing = sorted(set(acknowledged) - set(readable))
    if missing:
        raise RuntimeError(f"tasks {missing[:10]} were not readable within {DEADLINE_S:.0f} s")
    return {t: 1000 * (readable[t] - acknowledged[t]) for t in sorted(acknowledged)}


def _wait_until(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not happened():
        if time.monotonic() > end_s:
            raise RuntimeError(f"the warm-up's groups were not readable in {DEADLINE_S:.0f} s")
        time.sleep(0.01)


def _read(config: Config, topics: Topics, groups: int, readable: dict[int, float]) -> None:
    settings = consumer_config(config.kafka, "bench.reader")
    consumer = Consumer(settings | {"fetch.wait.max.ms": 500, "fetch.min.bytes": 1})
    partitions = range(config.kafka.num_partitions)
    consumer.assign([TopicPartition(topics.groups, p, 0) for p in partitions])
    end_s = time.monotonic() + DEADLINE_S + groups
    while len(readable) < groups and time.monotonic() < end_s:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            readable[int(message.key())] = time.monotonic()
    consumer.close()
