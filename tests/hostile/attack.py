"""Sends the records, runs one assembler as a process over them, and watches its memory."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from consumers.settlement import SettledSet
from infra.topic_reading import PartitionReader
from schemas.clients import consumer_config
from schemas.config import Config
from schemas.records import Manifest
from schemas.topics import Topics
from tests.hostile.judge import Verdict, judge
from tests.hostile.records import Attack

ROOT = Path(__file__).parents[2]
LOOK_S = 0.5
SAY_S = 10.0
ANSWER_S = 30.0
SENT_S = 300.0
SETTLED_SHARE = 0.25  # of the records, after which memory should have found its level
GROWTH_BYTES = 96 << 20  # allowed from then on
NO_PROGRESS_S = 120.0

Say = Callable[[str], None]


@dataclass
class Outcome:
    """`level_bytes` is the resident memory after a quarter, `peak_bytes` the most after that."""

    verdict: Verdict
    records: int
    seconds: float
    level_bytes: int
    peak_bytes: int

    @property
    def problems(self) -> list[str]:
        grown = self.peak_bytes - self.level_bytes
        flat = [] if grown <= GROWTH_BYTES else [f"memory grew by {grown >> 20} MiB"]
        return self.verdict.problems + flat

    def as_json(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "records_per_s": round(self.records / self.seconds),
            "fates": dict(self.verdict.fates),
            "dead_letters": dict(self.verdict.reasons),
            "memory_mib": {"level": self.level_bytes >> 20, "peak": self.peak_bytes >> 20},
            "problems": self.problems,
        }


class Died(Exception):
    """The assembler ended, or stood still."""


def run_attack(
    config: Config, manifest: Manifest, directory: Path, *, seed: int, records: int, say: Say
) -> Outcome:
    """Of a run whose topics and manifest exist. Raises Died."""
    topics, attack = Topics(config.run.id), Attack(manifest, seed, records)
    send(config, topics, attack)
    say(f"sent {records} records")
    began_s = time.monotonic()
    level, peak = _assembled(config, topics, directory, records, say)
    seconds = time.monotonic() - began_s
    with closing(PartitionReader(config.kafka, f"{config.run.id}.judge")) as reader:
        verdict = judge(config, manifest, attack, reader)
    return Outcome(verdict, records, seconds, level, peak)


def send(config: Config, topics: Topics, attack: Attack) -> None:
    producer = Producer(
        {
            "bootstrap.servers": config.kafka.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 5,
            "batch.size": 256 * 1024,  # a topic's limit is for the whole batch
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failures.append(error)

    for partition, key, value in attack:
        while True:
            try:
                producer.produce(topics.rows, value, key, partition, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(SENT_S) == 0
    assert not failures, (len(failures), failures[0])


def _assembled(
    config: Config, topics: Topics, directory: Path, records: int, say: Say
) -> tuple[int, int]:
    """Until everything is read and committed; resident bytes after a quarter and at their peak."""
    path, log_path = directory / "config.json", directory / "assembler.log"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.assembler_process", str(path), "hostile"]
    with (
        log_path.open("wb") as log,
        closing(_GroupCommits(config, topics)) as commits,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process,
    ):
        try:
            return _watched(process, commits, records, say)
        except Died as error:
            raise Died(f"{error}\n{log_path.read_text()[-3000:]}") from error
        finally:
            process.terminate()


def _watched(
    process: "subprocess.Popen[bytes]", commits: "_GroupCommits", records: int, say: Say
) -> tuple[int, int]:
    watched = psutil.Process(process.pid)
    level = peak = done = 0
    moved_s = said_s = time.monotonic()
    while done < records:
        time.sleep(LOOK_S)
        if process.poll() is not None:
            raise Died(f"the assembler ended with {process.returncode} after {done} records")
        memory = watched.memory_info().rss
        before, done = done, commits.seen()
        now_s = time.monotonic()
        moved_s = now_s if done > before else moved_s
        if now_s - moved_s > NO_PROGRESS_S:
            raise Died(f"the assembler stands at record {done} for {NO_PROGRESS_S:.0f} s")
        if done < SETTLED_SHARE * records:
            level = max(level, memory)
        else:
            peak = max(peak, memory)
        if now_s - said_s > SAY_S:
            said_s = now_s
            say(f"{done} of {records} records, {memory >> 20} MiB")
    return level or peak, peak


class _GroupCommits:
    def __init__(self, config: Config, topics: Topics) -> None:
        settings = consumer_config(config.kafka, f"{config.run.id}.look", topics.assembler_group)
        self._consumer = Consumer(settings)
        self._places = [
            TopicPartition(topics.rows, number) for number in range(config.kafka.num_partitions)
        ]

    def seen(self) -> int:
        """Records that were read and committed, over all partitions."""
        found = self._consumer.committed(self._places, timeout=ANSWER_S)
        return sum(SettledSet.decode(p.metadata)[1] for p in found if p.metadata)

    def close(self) -> None:
        self._consumer.close()
