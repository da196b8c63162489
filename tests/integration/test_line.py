"""The whole line with its real parts: prompts, vLLM, Kafka, groups, Megatron, new weights."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

DEADLINE_S = 540.0
STEPS = 10
AGREEMENT = 1e-3  # log-probability of a sampled token, vLLM against Megatron, float32


@dataclass
class Demo:
    """`groupstream demo` as a process of its own; `build` is where it puts everything."""

    build: Path
    process: subprocess.Popen[str]

    @property
    def run_directory(self) -> Path:
        runs = list((self.build / "demo/runs").glob("*"))
        return runs[0] if runs else self.build / "not-yet"

    def steps(self) -> list[dict]:
        metrics = self.run_directory / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def pids(self) -> dict[str, int]:
        path = self.run_directory / "pids.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert self.process.poll() is None, f"ended before {what}: {self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.output()[-3000:]}"
            time.sleep(0.1)

    def kill(self, role: str) -> None:
        """kill -9, and the role is back under another pid."""
        pid = self.pids()[role]
        os.kill(pid, signal.SIGKILL)
        self.wait_for(f"{role} again", lambda: self.pids().get(role) not in (None, pid))

    def output(self) -> str:
        return (self.build / "output.txt").read_text()


@contextmanager
def demo(build: Path, *settings: str) -> Iterator[Demo]:
    command = [sys.executable, "-m", "infra.cli.main", "demo", "--new", "--build", str(build)]
    with (build / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *settings], stdout=output, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield Demo(build, process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_roles_are_killed_and_every_task_is_trained_once(broker, tmp_path):
    settings = [
        "seed=5",
        f"steps={STEPS}",
        "prompts=8",
        "generations=4",
        "grpo.async_grpo.enabled=false",
        "checkpointing.save_period=3",
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
    ]
    with demo(tmp_path, *settings) as running:
        for step, role in ((1, "assembler-0"), (3, "gym-shard-adder-0"), (5, "trainer")):
            running.wait_for(f"step {step}", lambda step=step: len(running.steps()) > step)
            running.kill(role)
        left = [psutil.Process(pid) for pid in running.pids().values()]
        assert running.process.wait(DEADLINE_S) == 0, running.output()[-3000:]
        steps = running.steps()

    result = json.loads((tmp_path / "demo.json").read_text())
    assert (result["lost"], result["doubled"], result["outstanding"]) == (0, 0, 0)
    assert result["dispatched"] == result["accepted"] + sum(result["abandoned"].values())
    assert set(result["exit_codes"].values()) == {0}
    assert not [one for one in left if one.is_running() and one.status() != "zombie"]

    trained = {}
    for line in steps:
        assert trained.setdefault(line["step"], line["tasks"]) == line["tasks"]
    assert sorted(trained) == list(range(STEPS))
    tasks = [task for step in sorted(trained) for task in trained[step]]
    assert len(tasks) == len(set(tasks)) == result["accepted"]

    # Synchronous: every group is of the newest version, so both engines scored the same weights.
    assert all(line["staleness"] == 0 for line in steps)
    assert max(line["logprob_error_max"] for line in steps) <= AGREEMENT
