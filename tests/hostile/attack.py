"""Sends the records, runs one assembler as a process over them, and watches its memory."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
LEAST_SAMPLES = 10  # with fewer a large attack has not shown that memory stays level
LARGE = 100_000  # records; a smaller attack may be over within a sample or two
NO_PROGRESS_S = 120.0
STOPS_WITHIN_S = 10.0

Say = Callable[[str], None]


@dataclass
class Outcome:
    """`memory`: resident bytes, in order, from a quarter of the records on; at least one."""

    verdict: Verdict
    records: int
    seconds: float
    memory: Sequence[int]

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems + memory_flaws(self.memory, self.records)

    def as_json(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "records_per_s": round(self.records / self.seconds),
            "fates": dict(self.verdict.fates),
            "dead_letters": dict(self.verdict.reasons),
            "memory_mib": {
                "level": self.memory[0] >> 20,
                "peak": max(self.memory) >> 20,
                "samples": len(self.memory),
            },
            "problems": self.problems,
        }


def memory_flaws(memory: Sequence[int], records: int) -> list[str]:
    """Of resident bytes from a quarter of `records` on: the first is the level."""
    grown = max(memory) - memory[0]
    flaws = [f"memory grew by {grown >> 20} MiB"] if grown > GROWTH_BYTES else []
    if records >= LARGE and len(memory) < LEAST_SAMPLES:
        flaws.append(f"memory was seen {len(memory)} times only: whether it is level is not known")
    return flaws


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
    memory = _assembled(config, topics, directory, records, say)
    seconds = time.monotonic() - began_s
    with closing(PartitionReader(config.kafka, f"{config.run.id}.judge")) as reader:
        verdict = judge(config, manifest, attack, reader)
    return Outcome(verdict, records, seconds, memory)


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
) -> list[int]:
    """Until everything is read and committed; resident bytes from a quarter on."""
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
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _watched(
    process: "subprocess.Popen[bytes]", commits: "_GroupCommits", records: int, say: Say
) -> list[int]:
    watched = psutil.Process(process.pid)
    settled: list[int] = []
    done = 0
    moved_s = said_s = time.monotonic()
    while done < records:
        time.sleep(LOOK_S)
        if process.poll() is not None:
            raise Died(f"the assembler ended with {process.returncode} after {done} records")
        before, done = done, commits.seen()
        memory = watched.memory_info().rss
        now_s = time.monotonic()
        moved_s = now_s if done > before else moved_s
        if now_s - moved_s > NO_PROGRESS_S:
            raise Died(f"the assembler stands at record {done} for {NO_PROGRESS_S:.0f} s")
        if done >= SETTLED_SHARE * records:
            settled.append(memory)
        if now_s - said_s > SAY_S:
            said_s = now_s
            say(f"{done} of {records} records, {memory >> 20} MiB")
    return settled


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
