"""The gym shard against a real broker, with a gym that needs no model."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from infra.init import init_run
from producers.gym_shard import run
from schemas.clients import consumer_config, producer_config
from schemas.codec import decode, encode
from schemas.config import Config
from schemas.errors import ConfigError, RunStopped
from schemas.identity import key_of
from schemas.records import (
    AttemptFailed,
    ExecutionStarted,
    Fatal,
    Finished,
    Heartbeat,
    PolicyVersion,
    PromptGroup,
    RolloutRow,
)
from schemas.topics import CONTROL_FATAL, CONTROL_FINISHED, CONTROL_POLICY, Topics
from tests.prompts import make_group
from tests.rows import make_stamp

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
NO_HEARTBEAT = Heartbeat(
    role="", instance="", incarnation="", pid=0, host="", at_ms=0, loop_at_ms=0, doing="",
    doing_since_ms=0,
)  # fmt: skip


class Line:
    """A run's topics as the rest of the system would use them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.manifest = init_run(config)
        self.topics = Topics(config.run.id)
        self._producer = Producer(producer_config(config.kafka, "test"))
        self._consumer = Consumer(consumer_config(config.kafka, "test-reader"))
        self._consumer.assign(
            [
                *(TopicPartition(self.topics.rows, p, 0) for p in range(2)),
                TopicPartition(self.topics.status, 0, 0),
            ]
        )
        self._seq = Counter[int]()
        self.records: list[tuple[int, Any]] = []
        self.last = NO_HEARTBEAT

    def prompt(self, task: int, *, partition: int = 0, **changes: Any) -> None:
        group = make_group(self.manifest, task, seq=self._seq[partition], **changes)
        self._seq[partition] += 1
        self._produce(self.topics.prompts("gym"), group, key_of(task), partition)

    def control(self, key: str, record: Any) -> None:
        self._produce(self.topics.control, record, key.encode(), 0)

    def policy(self, version: int) -> None:
        record = PolicyVersion(version=version, weights_dir="none", published_at_ms=1)
        self.control(CONTROL_POLICY, record)

    def committed(self, partition: int = 0) -> tuple[int, str]:
        reader = Consumer(
            consumer_config(self.config.kafka, "test", self.topics.shard_group("gym"))
        )
        try:
            (found,) = reader.committed(
                [TopicPartition(self.topics.prompts("gym"), partition)], timeout=10
            )
        finally:
            reader.close()
        assert found.error is None
        return found.offset, (found.metadata or "").partition(" ")[0]

    def until(self, holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Reads `rows` and `status` until it holds."""
        ends_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < ends_s, f"{self.records}\n{self.last}"
            self.read(0.1)

    def read(self, wait_s: float) -> None:
        message = self._consumer.poll(wait_s)
        if message is None:
            return
        assert message.error() is None
        record = decode(message.value())
        if isinstance(record, Heartbeat):
            self.last = record
        else:
            self.records.append((message.partition(), record))

    def read_for(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self.read(0.1)

    def of(self, kind: type) -> list[Any]:
        return [record for _, record in self.records if isinstance(record, kind)]

    def started(self) -> list[tuple[int, int]]:
        """Cohorts by the time of their start; tasks lie on two partitions, read in any order."""
        records = sorted(self.of(ExecutionStarted), key=lambda record: record.started_at_ms)
        return [record.cohort for record in records]

    def rows_of(self, task: int) -> list[RolloutRow]:
        return [row for row in self.of(RolloutRow) if row.task_index == task]

    def close(self) -> None:
        self._consumer.close()

    def _produce(self, topic: str, record: Any, key: bytes, partition: int) -> None:
        self._producer.produce(topic, encode(record), key, partition=partition)
        assert self._producer.flush(10) == 0


@pytest.fixture
def line(broker, run_id, tmp_path) -> Iterator[Line]:
    yield from _line(broker, run_id, tmp_path, max_concurrent_groups=4)


@pytest.fixture
def narrow_line(broker, run_id, tmp_path) -> Iterator[Line]:
    """One attempt at a time."""
    yield from _line(broker, run_id, tmp_path, max_concurrent_groups=1)


@pytest.fixture
def two_replicas(broker, run_id, tmp_path) -> Iterator[Line]:
    yield from _line(broker, run_id, tmp_path, replicas=2)


def _line(broker, run_id, tmp_path, **shard) -> Iterator[Line]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    config = Config.model_validate(
        {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "kafka": {
                "bootstrap_servers": broker.bootstrap_servers,
                "num_partitions": 2,
                "session_timeout_ms": 30_000,
                "max_row_bytes": 16_384,
            },
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
            "data": {"train_jsonl_fpath": str(prompts)},
            "policy": {"model_name": "none"},
            "env": {"agents": {"sums": {"gym": "tests.integration.tiny_gym:TinyGym"}}},
            "shards": {"gym": {"agents": ["sums"], **shard}},
        }
    )
    made = Line(config)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    yield made
    made.close()


@contextlib.contextmanager
def shard_thread(line: Line, replica: int = 0) -> Iterator[list[BaseException]]:
    """The shard in this process; ends it. Yields what run() raised, if it did."""
    stop, raised = threading.Event(), []

    def serve() -> None:
        try:
            run(line.config, shard="gym", replica=replica, stop=stop)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def shard_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "shard.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.integration.run_shard",
                str(tmp_path / "config.json"), "gym", "0",
            ],
            cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)


def test_prompts_become_rows_and_the_end_of_the_run_ends_the_shard(line):
    line.policy(0)
    for task in range(5):
        line.prompt(task, partition=task % 4, attempt=task % 2, target_step=3)
    with shard_thread(line) as raised:
        line.until(lambda: len(line.of(RolloutRow)) == 20)
        line.until(lambda: line.last.counters.get("groups_done") == 5)
        line.control(CONTROL_FINISHED, Finished(step=1, at_ms=1))
        line.until(lambda: line.last.doing == "ended")
    assert raised == []
    for task in range(5):
        own = [(p, r) for p, r in line.records if r.task_index == task]
        assert {partition for partition, _ in own} == {task % 2}
        assert [type(record) for _, record in own] == [ExecutionStarted] + [RolloutRow] * 4
        rows = line.rows_of(task)
        assert [row.row_index for row in rows] == [0, 1, 2, 3]
        assert [row.timing for row in rows] == [None] * 3 + [{"run": 0.5}]
        assert {row.execution_id for row in rows} == {own[0][1].execution_id}
        expected = make_stamp(line.manifest, task, task % 2, 3, 4)
        assert {row.stamp for row in rows} == {expected}
    last = line.last
    assert last.counters["rows_sent"] == 20
    assert last.counters["sampled_tokens"] == 20 * 6
    assert (last.counters["groups_running"], last.running) == (0, [])
    assert last.committed_seq == {"0": 1, "1": 0, "2": 0, "3": 0}


def test_an_offset_is_committed_before_the_start_and_not_earlier(narrow_line):
    line = narrow_line
    line.policy(0)
    for task in range(3):
        line.prompt(task, rows=[{"sleep_s": 3 if task == 1 else 0}])
    with shard_thread(line):
        line.until(lambda: line.started() == [(0, 0), (1, 0)])
        assert line.committed() == (2, "1")
        line.until(lambda: [r.task_index for r in line.last.running] == [1])
        assert line.committed() == (2, "1")
        assert line.started() == [(0, 0), (1, 0)]
        line.until(lambda: len(line.rows_of(2)) == 4)
    assert line.committed() == (3, "2")


def test_a_killed_shards_attempts_are_not_executed_again(narrow_line, tmp_path):
    line = narrow_line
    line.policy(0)
    line.prompt(0)
    line.prompt(1, rows=[{"sleep_s": 60}])
    line.prompt(2)
    line.prompt(3)
    with shard_process(tmp_path) as process:
        line.until(lambda: (1, 0) in line.started())
        process.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    first = line.last.incarnation
    with shard_process(tmp_path) as process:
        line.until(lambda: len(line.rows_of(3)) == 4)
        took_s = time.monotonic() - killed_s
        line.until(lambda: line.last.committed_seq.get("0") == 3)
        process.terminate()
        assert process.wait(20) == 0
    assert line.started() == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert line.rows_of(1) == []
    assert line.last.incarnation != first
    print(f"rows again {took_s:.1f} s after the kill, with a session of 30 s")
    assert took_s < 25  # the member id is static: nobody waits for the dead one's session to end


def test_a_restarted_shard_knows_what_its_predecessor_committed(line, tmp_path):
    line.policy(0)
    line.prompt(0)
    line.prompt(1)
    with shard_thread(line):
        line.until(lambda: len(line.rows_of(1)) == 4)
    line.last = NO_HEARTBEAT
    with shard_thread(line):
        line.until(lambda: line.last.committed_seq.get("0") == 1)
        line.read_for(1.0)
    assert line.started() == [(0, 0), (1, 0)]


def test_a_zombie_is_fenced(line, tmp_path):
    line.policy(0)
    line.prompt(0)
    with shard_process(tmp_path) as zombie:
        line.until(lambda: len(line.rows_of(0)) == 4)
        zombie.send_signal(signal.SIGSTOP)
        line.prompt(1)
        with shard_process(tmp_path):
            line.until(lambda: len(line.rows_of(1)) == 4)
            zombie.send_signal(signal.SIGCONT)
            line.prompt(2)
            line.until(lambda: len(line.rows_of(2)) == 4)
            assert zombie.wait(30) != 0
            line.prompt(3)
            line.until(lambda: len(line.rows_of(3)) == 4)
    assert "a newer process is gym shard gym/0 now" in (tmp_path / "shard.log").read_text()
    assert line.started() == [(task, 0) for task in range(4)]


def test_a_prompt_waits_for_its_policy_while_other_partitions_go_on(line):
    line.policy(0)
    line.prompt(0, min_version=2)
    line.prompt(1)
    line.prompt(2, partition=1)
    with shard_thread(line):
        line.until(lambda: len(line.rows_of(2)) == 4)
        line.policy(1)
        line.until(lambda: "waiting for policy version 2" in line.last.doing)
        line.until(lambda: line.last.counters.get("version") == 1)
        assert line.started() == [(2, 0)]
        line.policy(2)
        line.until(lambda: len(line.rows_of(1)) == 4)
    assert line.started() == [(2, 0), (0, 0), (1, 0)]
    versions = {record.task_index: record.version_start for record in line.of(ExecutionStarted)}
    assert versions == {2: 0, 0: 2, 1: 2}


def test_nothing_starts_before_the_first_policy(line):
    line.prompt(0)
    with shard_thread(line):
        line.until(lambda: "waiting for policy" in line.last.doing)
        assert line.started() == []
        line.policy(0)
        line.until(lambda: len(line.rows_of(0)) == 4)


def test_a_failing_attempt_leaves_its_neighbours_alone(line):
    line.policy(0)
    line.prompt(0, rows=[{"error": "lost"}])
    line.prompt(1, rows=[{"sleep_s": 0.3}])
    line.prompt(2, agent="unknown")
    line.prompt(3, rows=[{"sleep_s": 30}], deadline_s=0.3)
    with shard_thread(line):
        line.until(lambda: len(line.of(AttemptFailed)) == 3 and len(line.rows_of(1)) == 4)
        line.until(lambda: line.last.counters.get("attempts_failed") == 3)
    failed = {record.task_index: record for record in line.of(AttemptFailed)}
    assert {task: (f.reason, f.failure_class) for task, f in failed.items()} == {
        0: ("gym_error", "infra"),
        2: ("unknown_agent", "data"),
        3: ("deadline", "infra"),
    }
    assert "LookupError: 'lost'" in failed[0].message or "LookupError: lost" in failed[0].message
    assert failed[2].execution_id is None
    assert (2, 0) not in line.started()


def test_a_row_over_the_limit_fails_its_attempt_with_both_numbers(line):
    line.policy(0)
    line.prompt(0, rows=[{"tokens": 3000}])
    line.prompt(1, rows=[{"tokens": 1000}])
    with shard_thread(line):
        line.until(lambda: len(line.of(AttemptFailed)) == 1 and len(line.rows_of(1)) == 4)
    (failed,) = line.of(AttemptFailed)
    assert (failed.task_index, failed.reason, failed.failure_class) == (0, "too_large", "data")
    assert "bytes, over the limit kafka.max_row_bytes 16384" in failed.message
    assert line.rows_of(0) == []


def test_a_second_replica_takes_its_share_and_nothing_runs_twice(two_replicas):
    line = two_replicas
    line.policy(0)
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for task in range(sent, sent + count):
            line.prompt(task, partition=task % 8, rows=[{"sleep_s": 0.05}])
        sent += count

    def replicas() -> set[int]:
        return {record.replica for record in line.of(ExecutionStarted)}

    send(32)
    with shard_thread(line, 0):
        line.until(lambda: len(line.of(RolloutRow)) >= 4)
        ends_s = time.monotonic() + WAIT_S
        with shard_thread(line, 1):
            while replicas() != {0, 1}:  # prompts keep coming while partitions change hands
                assert time.monotonic() < ends_s
                send(8)
                line.until(lambda: len(line.of(RolloutRow)) >= 4 * (sent - 8))
            send(8)
            line.until(lambda: len(line.of(RolloutRow)) == 4 * sent)
    line.read_for(0.5)
    assert Counter(line.started()) == dict.fromkeys([(task, 0) for task in range(sent)], 1)
    assert line.of(AttemptFailed) == []


def test_a_lonely_prompt_has_the_replica_for_itself(line):
    line.policy(0)
    line.prompt(0, rows=[{"sleep_s": 0.5}])
    with shard_thread(line):
        line.until(lambda: line.started() == [(0, 0)])
        line.prompt(1, partition=1, alone=True, rows=[{"sleep_s": 0.5}])
        time.sleep(0.2)
        line.prompt(2, partition=2)
        line.until(lambda: len(line.rows_of(2)) == 4)
    at = {record.task_index: record for record in line.of(ExecutionStarted)}
    ends = {task: line.rows_of(task)[-1].produced_at_ms for task in range(3)}
    assert at[1].started_at_ms >= ends[0]
    assert at[2].started_at_ms >= ends[1]


def test_a_fatal_run_stops_the_shard_with_its_message(line):
    line.policy(0)
    with shard_thread(line) as raised:
        line.until(lambda: line.last.pid > 0)
        line.control(CONTROL_FATAL, Fatal(role="dispatcher", message="too many", at_ms=1))
        line.until(lambda: line.last.doing.startswith("ended"))
    assert [type(error) for error in raised] == [RunStopped]
    assert "too many" in str(raised[0])


def test_stopping_ends_running_attempts_within_seconds_and_says_nothing(line):
    line.policy(0)
    line.prompt(0, rows=[{"sleep_s": 60}])
    with shard_thread(line) as raised:
        line.until(lambda: (0, 0) in line.started())
        since_s = time.monotonic()
    assert time.monotonic() - since_s < 10
    assert raised == []
    line.read_for(0.5)
    assert line.of(AttemptFailed) == []


@pytest.mark.parametrize(
    ("shard", "replica", "words"),
    [("other", 0, r"no shard 'other'.*\['gym'\]"), ("gym", 1, "replica 1.*count from 0")],
)
def test_an_unknown_replica_is_refused(line, shard, replica, words):
    with pytest.raises(ConfigError, match=words):
        run(line.config, shard=shard, replica=replica, stop=threading.Event())


def test_prompt_groups_are_stamped_like_their_rows(line):
    group: PromptGroup = make_group(line.manifest, 3)
    assert group.stamp == make_stamp(line.manifest, 3, 0, 0, 4)
