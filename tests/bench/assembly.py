"""Rows to groups: the real assembler's bytes a second against a raw transactional pass-through."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.clients import bootstrap_servers, consumer_config
from schemas.config import Config
from schemas.topics import Topics
from tests.bench.load import GROUP_SIZE, new_run, send_rows
from tests.bench.results import Result, against

DEADLINE_S = 300.0
POLL_S = 0.02


def measure(
    bootstrap: str,
    directory: Path,
    *,
    groups: int,
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> Result:
    """Both run once unmeasured: the first run after a broker's start is less than half as fast."""
    ours: list[float] = []
    raw: list[float] = []
    for round_index in range(rounds + 1):
        kept = round_index > 0
        for name, module, figures in (
            ("raw pass-through", passthrough_command, raw),
            ("assembler", assembler_command, ours),
        ):
            rate = _rate(bootstrap, directory, module, groups, tokens)
            say(f"{name}: {rate:,.0f} rows/s" + ("" if kept else " (warm-up)"))
            if kept:
                figures.append(rate)
    return against(f"rows to groups, G={GROUP_SIZE}, {tokens} tokens a row", "rows/s", ours, raw)


def assembler_command(path: Path) -> Sequence[str]:
    return [
        str(Path(sys.executable).with_name("groupstream-assembler")),
        "--config", str(path), "--instance", "bench",
    ]  # fmt: skip


def passthrough_command(path: Path) -> Sequence[str]:
    return [sys.executable, "-m", "tests.bench.passthrough", str(path)]


@contextmanager
def running(command: Sequence[str], log: Path):
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def config_file(config: Config, directory: Path) -> Path:
    path = directory / f"{config.run.id}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def _rate(
    bootstrap: str,
    directory: Path,
    command: Callable[[Path], Sequence[str]],
    groups: int,
    tokens: int,
) -> float:
    """Rows a second, from the first commit that is seen to the one that covers every row."""
    config, manifest = new_run(bootstrap, directory)
    send_rows(config, manifest, groups, tokens)
    log = directory / f"{config.run.id}.log"
    with running(command(config_file(config, directory)), log) as process:
        return _watched(config, groups * GROUP_SIZE, process, log)


def _watched(config: Config, rows: int, process: subprocess.Popen[bytes], log: Path) -> float:
    end_s = time.monotonic() + DEADLINE_S
    began_s, began_rows = 0.0, 0
    committed = _Committed(config)
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"the process ended with {process.returncode}; see {log}")
        done, now_s = committed.rows(), time.monotonic()
        if done and not began_s:
            began_s, began_rows = now_s, done
        if done >= rows:
            return (rows - began_rows) / (now_s - began_s)
        time.sleep(POLL_S)
    raise RuntimeError(f"{done} of {rows} rows committed within {DEADLINE_S:.0f} s; see {log}")


class _Committed:
    """How many rows the group's commits cover."""

    def __init__(self, config: Config) -> None:
        topics = Topics(config.run.id)
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers(config.kafka)})
        self._request = ConsumerGroupTopicPartitions(topics.assembler_group)
        probe = Consumer(consumer_config(config.kafka, "bench.probe"))
        self._starts = {
            p: probe.get_watermark_offsets(TopicPartition(topics.rows, p), timeout=10)[0]
            for p in range(config.kafka.num_partitions)
        }
        probe.close()

    def rows(self) -> int:
        futures = self._admin.list_consumer_group_offsets([self._request])
        found = futures[self._request.group_id].result(30).topic_partitions
        return sum(max(0, t.offset - self._starts[t.partition]) for t in found)
