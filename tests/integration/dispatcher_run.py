"""A run around a real dispatcher: the test plays the trainer, the shards and the assembler."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from infra.init import init_run
from producers.dispatcher import run
from producers.ledger import Ledger
from producers.tail import Tail
from schemas.clients import producer_config
from schemas.codec import decode, encode
from schemas.config import Config
from schemas.control import ControlLog, ControlState
from schemas.identity import key_of, partition_of
from schemas.records import (
    EventKind,
    Finished,
    GroupEvent,
    Heartbeat,
    LedgerTask,
    LedgerTotals,
    OfAttempt,
    PolicyVersion,
    PromptGroup,
    Record,
    RunningAttempt,
)
from schemas.status import now_ms
from schemas.topics import CONTROL_FINISHED, CONTROL_POLICY, PARTITIONS_PER_REPLICA, Topics
from tests.rows import make_identity

N, G, P = 2, 3, 3
PATIENCE_S = 30.0


def config_of(bootstrap_servers: str, run_id: str, directory: Path, **changes: Any) -> Config:
    """N = 2, G = 3, P = 3, one version ahead; `changes` are sections to merge in."""
    prompts = directory / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts, 200)
    sections: dict[str, dict[str, Any]] = {
        "run": {"id": run_id, "directory": str(directory)},
        "kafka": {"bootstrap_servers": bootstrap_servers, "num_partitions": P},
        "data": {"train_jsonl_fpath": str(prompts)},
        "policy": {"model_name": "none"},
        "loss_fn": {"use_importance_sampling_correction": True},
        "env": {"agents": {"sums": {"gym": "a:B"}, "products": {"gym": "a:B"}}},
        "shards": {
            "one": {"agents": ["sums"], "replicas": 2},
            "two": {"agents": ["products"]},
        },
        "grpo": {
            "num_prompts_per_step": N,
            "num_generations_per_prompt": G,
            "async_grpo": {"enabled": True, "max_generation_failures": 9},
        },
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def write_prompts(path: Path, count: int) -> None:
    lines = [
        json.dumps(
            {
                "responses_create_params": {"input": f"{number}+1="},
                "agent_ref": {"name": ("sums", "products")[number % 2]},
                "number": number,
            }
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines))


class World:
    """Reads what the dispatcher writes, and writes what the others would."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.topics = Topics(config.run.id)
        self.manifest = init_run(config)
        self.dispatcher: Future[None] | None = None
        self.prompts: list[PromptGroup] = []
        self.requests: list[OfAttempt] = []
        self.producer = Producer(producer_config(config.kafka, f"{config.run.id}.test"))
        self._tails = [
            self._tail(self.topics.prompts(shard), replicas * PARTITIONS_PER_REPLICA)
            for shard, replicas in self.manifest.shards.items()
        ]
        self._rows = self._tail(self.topics.rows, P)
        self._status = self._tail(self.topics.status, 1)
        self.doing: dict[str, str] = {}
        self.control = ControlLog(config.kafka, self.topics, f"{config.run.id}.test")
        # a commit is answered before it can be read everywhere
        self.wait_for("manifest", lambda world: world.control.state.manifest)

    def close(self) -> None:
        for tail in (*self._tails, self._rows, self._status):
            tail.close()
        self.control.close()

    def read(self) -> "World":
        self.control.poll()
        for tail in self._tails:
            self.prompts += [decode(message.value()) for message in tail.poll(0.0)]
        self.requests += [decode(message.value()) for message in self._rows.poll(0.0)]
        for message in self._status.poll(0.0):
            beat = decode(message.value())
            if beat.role == "dispatcher":
                self.doing[beat.incarnation] = beat.doing
        return self

    def dispatchers_at_work(self) -> int:
        """How many have read everything and wait for groups."""
        return sum(doing.startswith("waiting for") for doing in self.doing.values())

    def wait_for(self, what: str, reached: Callable[["World"], Any]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not reached(self.read()):
            if self.dispatcher is not None and self.dispatcher.done():
                self.dispatcher.result()
            assert time.monotonic() < until, f"no {what}: {self.newest()}, {self.requests}"
            time.sleep(0.01)

    def wait_for_prompts(self, count: int) -> list[PromptGroup]:
        """The first `count` prompts, in the order of their tasks and attempts."""
        self.wait_for(f"{count} prompts", lambda world: len(world.prompts) >= count)
        return sorted(self.prompts, key=lambda prompt: prompt.cohort)

    def stays_quiet(self, seconds: float = 0.5) -> None:
        """Nothing more is dispatched or asked for."""
        before = len(self.prompts), len(self.requests)
        time.sleep(seconds)
        self.read()
        assert (len(self.prompts), len(self.requests)) == before

    def newest(self) -> dict[int, PromptGroup]:
        """The prompt of the highest attempt by task."""
        return {p.task_index: p for p in sorted(self.prompts, key=lambda prompt: prompt.attempt)}

    def publish(self, version: int) -> None:
        record = PolicyVersion(version=version, weights_dir="none", published_at_ms=now_ms())
        self.write(self.topics.control, 0, CONTROL_POLICY.encode(), record)

    def finish(self, step: int) -> None:
        record = Finished(step=step, at_ms=now_ms())
        self.write(self.topics.control, 0, CONTROL_FINISHED.encode(), record)

    def say(self, kind: EventKind, task_index: int, **changes: Any) -> None:
        """An event about the newest attempt of a task, unless another is named."""
        prompt = self.newest()[task_index]
        attempt = changes.pop("attempt", prompt.attempt)
        identity = make_identity(self.manifest, task_index, attempt, target_step=prompt.target_step)
        event = GroupEvent(**identity, kind=kind, at_ms=now_ms(), **changes)
        self.write(self.topics.events, partition_of(task_index, P), key_of(task_index), event)

    def beat(
        self, instance: str, incarnation: str, committed: dict[str, int], running: list[int]
    ) -> None:
        attempts = [
            RunningAttempt(task_index=t, attempt=0, rows_done=0, group_size=G, started_at_ms=1)
            for t in running
        ]
        record = Heartbeat(
            role="gym-shard", instance=instance, incarnation=incarnation, pid=1, host="h",
            at_ms=now_ms(), loop_at_ms=now_ms(), doing="", doing_since_ms=1,
            committed_seq=committed, running=attempts,
        )  # fmt: skip
        self.write(self.topics.status, 0, f"gym-shard/{instance}".encode(), record)

    def write(self, topic: str, partition: int, key: bytes, record: Record) -> None:
        self.producer.produce(topic, encode(record), key, partition=partition)
        assert self.producer.flush(10) == 0

    def committed_events(self) -> int:
        """How many events the dispatcher's committed offsets cover."""
        with closing(
            Tail(self.config.kafka, self.topics.events, "test", self.topics.dispatcher_group)
        ) as tail:
            return sum(offset or 0 for offset in tail.committed(range(P), PATIENCE_S).values())

    def ledger(self) -> Ledger:
        """What a restart would begin with."""
        with closing(self._tail(self.topics.dispatch, 1)) as tail:
            found: list[tuple[bytes, LedgerTask | LedgerTotals | None]] = []
            for message in tail.read_to_end(PATIENCE_S):
                value = message.value()
                found.append((message.key(), None if value is None else decode(value)))
        return Ledger.folded(found, self.manifest.first_task_index, G)

    def controlled(self) -> ControlState:
        return self.control.read_to_end()

    def _tail(self, topic: str, partitions: int) -> Tail:
        tail = Tail(self.config.kafka, topic, f"{self.config.run.id}.test")
        tail.start(dict.fromkeys(range(partitions), 0))
        return tail


@contextmanager
def dispatching(world: World, expected: type[Exception] | None = None) -> Iterator[Future[None]]:
    """The dispatcher in a thread, stopped at the end; raises what it raised and should not."""
    stop = threading.Event()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(stop.set)
        future = world.dispatcher = pool.submit(run, world.config, stop=stop)
        yield future
        stop.set()
        error = future.exception(PATIENCE_S)
        assert type(error) is (expected or type(None)), error


class Process:
    """The dispatcher as a process, for kill -9."""

    def __init__(self, config: Config, directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(config.model_dump_json())
        self._log = (directory / "dispatcher.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.run_dispatcher", str(path)],
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._log.close()

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._log.close()
        return code
