"""A trainer that trains nothing: it records which tasks each step was given, and goes on.

On Kafka it is the trainer: the same transactional id, reader, batches and records on `control`. A
checkpoint is only its record, whose offsets a restart reads from. The order of a step is the real
one too: announce the version, append the step's line, record the checkpoint.

`python -m tests.chaos.recorder --config FILE` is such a process.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import orjson
import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import GroupsContradict, RecordUnreadable, RunStopped
from schemas.manifest import require_manifest
from schemas.records import (
    AssembledGroup,
    CheckpointRecorded,
    Fatal,
    Finished,
    PolicyVersion,
)
from schemas.status import Status, now_ms, reported
from schemas.topics import Topics
from trainer.batching import WaitingGroups
from trainer.publishing import ControlPublisher, Interrupted
from trainer.reader import GroupsReader

POLL_S = 0.1
STEP_VARIABLE = "GROUPSTREAM_CHAOS_STEP_S"
STEP_S = float(os.environ.get(STEP_VARIABLE, "0.05"))  # what a step takes at least

app = typer.Typer(add_completion=False)


@app.command()
def main(config: ConfigFile, overrides: Overrides = None) -> None:
    """Record the groups of each step."""
    raise typer.Exit(run_role("trainer", config, overrides, run))


def run(config: Config, stop: threading.Event) -> None:
    """Returns when the run has finished or `stop` is set. Raises RunStopped, Fenced."""
    topics = Topics(config.run.id)
    with reported(config.kafka, topics, "trainer", "0") as status:
        try:
            with _taken_over(config, topics, status, stop) as recorder:
                recorder.run()
        except Interrupted:
            return


@contextmanager
def _taken_over(
    config: Config, topics: Topics, status: Status, stop: threading.Event
) -> Iterator["Recorder"]:
    """Fences earlier ones, then reads `control` to its end."""
    publisher = ControlPublisher(config.kafka, topics, stop)
    status.turn("taking over from earlier trainers")
    publisher.take_over()
    control = ControlLog(config.kafka, topics, f"{topics.run_id}.trainer")
    with closing(control), closing(GroupsReader(config.kafka, topics)) as reader:
        control.read_to_end()
        yield Recorder(config, stop, status, publisher=publisher, control=control, reader=reader)


def version_file(config: Config) -> Path:
    """Where the gyms read the newest version; they hold no weights to load."""
    return config.run_directory / "version"


class Recorder:
    """`step` is the step that is recorded next."""

    def __init__(
        self,
        config: Config,
        stop: threading.Event,
        status: Status,
        *,
        publisher: ControlPublisher,
        control: ControlLog,
        reader: GroupsReader,
    ) -> None:
        self._config, self._stop, self._status = config, stop, status
        self._publisher, self._control, self._reader = publisher, control, reader
        self._waiting = WaitingGroups(0, {})
        self._announced = control.state.highest_version
        self._saved_step = -1

    @property
    def step(self) -> int:
        return self._waiting.next_step

    def run(self) -> None:
        state = self._control.state
        state.raise_if_fatal()
        if state.finished is not None:
            return
        self._begin()
        while not self._stop.is_set():
            groups = self._next_groups()
            if groups is None:
                return
            self._record(groups)

    def _begin(self) -> None:
        """From the recorded checkpoint; a new run's first state becomes one."""
        manifest = require_manifest(self._control.state, self._config)
        first_offsets = self._reader.first_offsets(manifest.num_partitions)
        recorded = self._control.state.checkpoint
        if recorded is None:
            self._waiting = WaitingGroups(manifest.first_step, first_offsets)
            self._save()
        else:
            offsets = {int(partition): offset for partition, offset in recorded.offsets.items()}
            self._waiting = WaitingGroups(recorded.step, offsets)
            self._saved_step = recorded.step
        self._reader.assign(self._waiting.offsets())
        if self.step > self._announced:
            self._announce()

    def _next_groups(self) -> list[AssembledGroup] | None:
        """Waits for the next step's groups. None where the run ends here, or stops."""
        state = self._control.state
        while not self._stop.is_set():
            self._control.poll()
            state.raise_if_fatal()
            if state.finished is not None:
                return None
            if state.last_target is not None and self.step > state.last_target:
                self._finish()
                return None
            size = state.targets.get(self.step, self._config.grpo.num_prompts_per_step)
            groups = self._taken(size)
            if groups is not None:
                return groups
            arrived = self._waiting.arrived()
            self._status.turn(f"step {self.step}: {len(arrived)} of {size} groups: {arrived}")
        return None

    def _taken(self, size: int) -> list[AssembledGroup] | None:
        try:
            groups = self._waiting.take(size)
            if groups is None:
                for read in self._reader.poll(POLL_S):
                    self._waiting.add(read)
                groups = self._waiting.take(size)
        except (GroupsContradict, RecordUnreadable) as error:
            self._declare_fatal(str(error))
        return groups

    def _record(self, groups: list[AssembledGroup]) -> None:
        time.sleep(STEP_S)
        step = self.step
        self._waiting.trained()
        if self.step > self._announced:
            self._announce()
        self._append(step, [group.task_index for group in groups])
        self._status.counters |= {"step": self.step, "version": self._announced}
        if self.step % self._config.checkpointing.save_period == 0:
            self._save()

    def _append(self, step: int, tasks: list[int]) -> None:
        """One write, so a kill leaves the whole line or nothing."""
        line = orjson.dumps({"step": step, "tasks": tasks, "at_ms": now_ms()})
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(self._config.metrics_path, flags, 0o644)
        try:
            os.write(file, line + b"\n")
        finally:
            os.close(file)

    def _announce(self) -> None:
        version = self.step
        path = version_file(self._config)
        fresh = path.with_name(f"version.{self._publisher.token}")
        # Before the announcement: who starts because of it must not find an older one.
        fresh.write_text(str(version))
        fresh.replace(path)
        self._publisher.publish(
            PolicyVersion(version=version, weights_dir="none", published_at_ms=now_ms())
        )
        self._announced = version

    def _save(self) -> None:
        self._control.poll()
        self._publisher.publish(
            CheckpointRecorded(
                step=self.step,
                directory="none",
                offsets={str(p): offset for p, offset in self._waiting.offsets().items()},
                next_task_index=self._control.state.next_task_index or 0,
                recorded_at_ms=now_ms(),
            )
        )
        self._saved_step = self.step

    def _finish(self) -> None:
        if self._saved_step != self.step:
            self._save()
        self._publisher.publish(Finished(step=self.step, at_ms=now_ms()))

    def _declare_fatal(self, message: str) -> NoReturn:
        self._publisher.publish(Fatal(role="trainer", message=message, at_ms=now_ms()))
        raise RunStopped(f"the run was stopped by the trainer: {message}")


if __name__ == "__main__":
    app()
