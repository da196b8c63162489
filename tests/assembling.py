"""An assembler and its run under test: what was sent, what it wrote, what it says of itself."""

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from consumers import worker
from schemas.codec import decode_as, row_payloads
from schemas.config import Config
from schemas.records import AssembledGroup, EventKind, GroupEvent, Heartbeat, Manifest
from schemas.topics import Topics
from tests.rows import make_manifest, make_rows
from tests.run import create_run, make_config, manifest_fields, read_topic, row_record, send

WAIT_S = 60.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    config: Config
    manifest: Manifest
    topics: Topics

    def send_rows(self, payloads: list[tuple[int, bytes]]) -> None:
        """(task_index, payload) each, in this order."""
        records = [row_record(self.manifest, task, payload) for task, payload in payloads]
        send(self.config, self.topics.rows, records)

    def groups(self, isolation: str = "read_committed") -> list[AssembledGroup]:
        messages = read_topic(self.config, self.topics.groups, isolation)
        return [decode_as(message.value(), AssembledGroup) for message in messages]

    def events(self, *kinds: EventKind) -> list[GroupEvent]:
        messages = read_topic(self.config, self.topics.events)
        events = [decode_as(message.value(), GroupEvent) for message in messages]
        return [event for event in events if event.kind in kinds]

    def dead_letters(self) -> list[Message]:
        return read_topic(self.config, self.topics.dlq)

    def is_drained(self) -> bool:
        """Every record of `rows` is committed as done with."""
        settings = {"group.id": self.topics.assembler_group, "isolation.level": "read_committed"}
        servers = {"bootstrap.servers": self.config.kafka.bootstrap_servers}
        consumer = Consumer(settings | servers)
        numbers = range(self.manifest.num_partitions)
        try:
            asked = [TopicPartition(self.topics.rows, number) for number in numbers]
            committed = consumer.committed(asked, timeout=WAIT_S)
            ends = [consumer.get_watermark_offsets(place, timeout=WAIT_S)[1] for place in asked]
            return [place.offset for place in committed] == ends
        finally:
            consumer.close()

    def shorten_session(self) -> None:
        """Of a KIP-848 group, where the broker sets it and not the member."""
        group = ConfigResource(
            ResourceType.GROUP,
            self.topics.assembler_group,
            incremental_configs=[
                ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                for name, value in (
                    ("consumer.session.timeout.ms", str(self.config.kafka.session_timeout_ms)),
                    ("consumer.heartbeat.interval.ms", "500"),
                )
            ],
        )
        admin = self.admin()
        admin.incremental_alter_configs([group])[group].result(WAIT_S)

    def admin(self) -> AdminClient:
        """Keep it in a variable: its futures fail when it is collected."""
        return AdminClient({"bootstrap.servers": self.config.kafka.bootstrap_servers})

    def heartbeat(self, instance: str) -> dict[str, float]:
        """The latest counters of an assembler; empty where it was not heard of."""
        key = f"{worker.ROLE}/{instance}".encode()
        messages = [m for m in read_topic(self.config, self.topics.status) if m.key() == key]
        return decode_as(messages[-1].value(), Heartbeat).counters if messages else {}


def create(
    bootstrap_servers: str, run_id: str, directory: Path, version: int | None = 0, **kafka: Any
) -> Run:
    """A new run with its topics and manifest; `kafka` changes that section of its configuration."""
    config = make_config(bootstrap_servers, run_id, directory, **kafka)
    manifest = make_manifest(**manifest_fields(config))
    return Run(config, manifest, create_run(config, manifest, version))


@contextmanager
def assembler(
    run: Run,
    instance: str = "a",
    *,
    ends_with: type[Exception] | None = None,
    saying: str = "",
) -> Iterator[Future[None]]:
    """In a thread of its own, stopped in order at the end; raises what it raised.

    With `ends_with` it must have ended by itself with that error, `saying` a regular expression.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.run, run.config, instance=instance, stop=stop)
        try:
            yield running
        finally:
            stop.set()
        if ends_with is None:
            running.result(WAIT_S)
        else:
            error = running.exception(WAIT_S)
            if type(error) is not ends_with:
                raise AssertionError(f"it ended otherwise than by {ends_with}") from error
            assert re.search(saying, str(running.exception())), running.exception()


@contextmanager
def process(
    run: Run, directory: Path, instance: str = "a", *harm: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, killed at the end; `harm` as tests.assembler_process takes it.

    What it says is in log_of().
    """
    path = directory / f"{run.config.run.id}.json"
    path.write_text(run.config.model_dump_json())
    command = [sys.executable, "-m", "tests.assembler_process", str(path), instance, *harm]
    with log_of(run, directory, instance).open("ab") as log:
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.kill()
        started.wait(WAIT_S)


def log_of(run: Run, directory: Path, instance: str = "a") -> Path:
    return directory / f"{run.config.run.id}-{instance}.log"


def wait_for(
    what: str,
    holds: Callable[[], bool],
    running: Future[None] | None = None,
    within_s: float = WAIT_S,
) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"no {what} within {within_s} s"
        if running is not None and running.done():
            running.result()
            raise AssertionError(f"the assembler ended before: {what}")
        time.sleep(0.2)


def shuffled_rows(
    manifest: Manifest, tasks: range, seed: int = 0, **rest: Any
) -> list[tuple[int, bytes]]:
    rows = [(task, payload) for task in tasks for payload in make_rows(manifest, task, **rest)]
    random.Random(seed).shuffle(rows)
    return rows


def assert_whole(run: Run, groups: list[AssembledGroup], sent: list[tuple[int, bytes]]) -> None:
    """Each group has the rows as sent, byte for byte, in order, once."""
    expected: dict[int, list[bytes]] = {}
    for task, payload in sent:
        expected.setdefault(task, []).append(payload)
    assert sorted(group.task_index for group in groups) == sorted(expected)
    for group in groups:
        assert [row.row_index for row in group.rows] == list(range(group.group_size))
        assert sorted(row_payloads(group)) == sorted(expected[group.task_index])


def assert_each_task_ended_once(run: Run, tasks: int) -> None:
    accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
    assert sorted(accepted) == list(range(tasks))
