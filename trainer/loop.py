"""The trainer: one optimizer step after the other, each from the groups of its slots.

    wait        `groups`, `control` and, for names, the ledger, in steps of POLL_S
       │        wakes: the step's last group, `target/<t>`, `last_target`, `fatal`, stop
       ▼
    train       all ranks: log-probabilities, one update; the version rises by one
       │
       ▼
    publish     weights under a new name, then `policy` on `control`; then the metrics line,
       │        then, every save_period steps, a checkpoint, recorded last: whatever stands below
       ▼        a recorded checkpoint was announced and measured
    forget      superseded weights, checkpoints and groups

A kill -9 at any point: the next trainer restores the recorded checkpoint, reads the same groups
again and trains the same steps to the same bits, without announcing a version twice.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import (
    DeadlineExceeded,
    Fenced,
    GroupsContradict,
    ManifestMismatch,
    OffsetsLost,
    RecordUnreadable,
    RunStopped,
)
from schemas.manifest import require_manifest
from schemas.records import AssembledGroup, CheckpointRecorded, Fatal, Finished, PolicyVersion
from schemas.status import Status, now_ms, reported
from schemas.topics import Topics
from trainer import parallel
from trainer.awaited import LedgerLog, awaited
from trainer.batching import WaitingGroups
from trainer.checkpoint import Progress
from trainer.directories import Leftovers, checkpoint_path, remove, weights_path
from trainer.job import Job
from trainer.metrics import Durations, MetricsFile, logprob_error_max, step_metrics
from trainer.publishing import ControlPublisher, Interrupted
from trainer.ranks import Ranks, follow
from trainer.reader import GroupsReader
from trainer.retention import Retention
from trainer.settings import model_parallel, require_ranks
from trainer.traces import TrainingBatch

POLL_S = 0.1
LOG_WAIT_S = 10.0
MAX_ZERO_UPDATES = 10  # in a row: nothing is learned, and something is wrong
_log = logging.getLogger(__name__)


def run(config: Config, *, stop: threading.Event) -> None:
    """Trains until the run is finished or `stop` is set; every rank of the job calls it.

    Raises RunStopped where the run is fatal, Fenced where a newer trainer took over, and another
    GroupstreamError for what a user can act on.
    """
    try:
        parallel.start(model_parallel(config.policy.megatron_cfg), seed=config.grpo.seed)
        require_ranks(config, distributed.get_world_size())
        job = Job(config)
        if parallel.is_first_rank():
            _lead(config, Ranks(job), stop)
        else:
            follow(job)
    finally:
        parallel.stop()


def _lead(config: Config, ranks: Ranks, stop: threading.Event) -> None:
    topics = Topics(config.run.id)
    leftovers = Leftovers.listed(config)  # before the take-over: nothing of a successor's is in it
    with reported(config.kafka, topics, "trainer", "0") as status:
        try:
            with _taken_over(config, topics, status, stop) as channels:
                Trainer(config, ranks, stop, status, channels).run(leftovers)
        except Interrupted as interrupted:
            _log.info("stopped while %s had no answer from Kafka", interrupted)
        except (RunStopped, Fenced, DeadlineExceeded, OffsetsLost, ManifestMismatch):
            ranks.end()  # none of these comes out of a collective: the others still listen
            raise
        ranks.end()


@dataclass(frozen=True)
class Channels:
    """Rank 0's connections to Kafka."""

    publisher: ControlPublisher
    control: ControlLog
    reader: GroupsReader
    ledger: LedgerLog


@contextmanager
def _taken_over(
    config: Config, topics: Topics, status: Status, stop: threading.Event
) -> Iterator[Channels]:
    """Fences earlier trainers, then reads `control` to its end: their last word is in it."""
    with ExitStack() as stack:
        status.turn("taking over from earlier trainers")
        publisher = ControlPublisher(config.kafka, topics, stop)
        publisher.take_over()
        status.turn("reading control")
        control = ControlLog(config.kafka, topics, f"{topics.run_id}.trainer")
        stack.enter_context(closing(control))
        require_manifest(control.read_to_end(), config)
        reader = stack.enter_context(closing(GroupsReader(config.kafka, topics)))
        ledger = stack.enter_context(closing(LedgerLog(config.kafka, topics)))
        yield Channels(publisher, control, reader, ledger)


class Trainer:
    """Rank 0's loop. `step` is the step that is trained next, so the version of the weights."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        stop: threading.Event,
        status: Status,
        channels: Channels,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._stop = stop
        self._status = status
        self._publisher = channels.publisher
        self._control = channels.control
        self._reader = channels.reader
        self._ledger = channels.ledger
        self._retention = Retention(config, Topics(config.run.id))
        self._metrics = MetricsFile(config.metrics_path)
        self._waiting = WaitingGroups(0, {})
        self._announced = self._control.state.highest_version
        self._saved_step = -1
        self._zero_updates = 0

    @property
    def step(self) -> int:
        return self._waiting.next_step

    def run(self, leftovers: Leftovers) -> None:
        """Restores or begins, then trains until the run ends or is stopped."""
        state = self._control.state
        state.raise_if_fatal()
        if state.finished is not None:
            _log.info("the run finished with step %d", state.finished.step)
            return
        for path in leftovers.unrecorded(state):
            _log.info("removing %s: a trainer died before it was recorded", path)
            remove(path)
        self._begin()
        while not self._stop.is_set():
            started = time.monotonic()
            groups = self._next_groups()
            if groups is None:
                return
            self._train(groups, wait_s=time.monotonic() - started)

    def _begin(self) -> None:
        """From the recorded checkpoint; a new run's first state becomes one."""
        state = self._control.state
        manifest = require_manifest(state, self._config)
        first_offsets = self._reader.first_offsets(manifest.num_partitions)
        recorded = state.checkpoint
        if recorded is None:
            self._status.turn(f"loading {self._config.policy.model_name}")
            self._waiting = WaitingGroups(manifest.first_step, first_offsets)
            self._ranks.build(None)
            self._save()
        else:
            self._status.turn(f"restoring {recorded.directory}")
            offsets = {int(partition): offset for partition, offset in recorded.offsets.items()}
            self._waiting = WaitingGroups(recorded.step, offsets)
            self._ranks.build(Path(recorded.directory))
            self._saved_step = recorded.step
            _log.info("restored step %d from %s", recorded.step, recorded.directory)
        self._reader.assign(self._waiting.offsets())
        if self.step > self._announced:
            self._announce()
        self._status.counters |= {
            "step": self.step,
            "version": self._announced,
            "ranks": self._ranks.count,
        }

    def _next_groups(self) -> list[AssembledGroup] | None:
        """Waits for the next step's groups. None where the run ends here, or stops."""
        state = self._control.state
        size = self._config.grpo.num_prompts_per_step
        self._status.turn(f"step {self.step}: waiting for groups")
        logged_at = time.monotonic()
        while not self._stop.is_set():
            self._control.poll()
            state.raise_if_fatal()
            if state.finished is not None:
                return None
            if state.last_target is not None and self.step > state.last_target:
                self._finish()
                return None
            groups = self._taken(state.targets.get(self.step, size))
            if groups is not None:
                return groups
            self._ranks.keep_alive()
            self._say_for_whom(state.targets.get(self.step, size))
            if time.monotonic() - logged_at > LOG_WAIT_S:
                _log.info("%s", self._status.doing)
                logged_at = time.monotonic()
        return None

    def _taken(self, size: int) -> list[AssembledGroup] | None:
        """The step's groups, if they are here now or after at most POLL_S."""
        try:
            groups = self._waiting.take(size)
            if groups is None:
                for read in self._reader.poll(POLL_S):
                    self._waiting.add(read)
                groups = self._waiting.take(size)
        except (GroupsContradict, RecordUnreadable) as error:
            self._declare_fatal(str(error))
        self._status.counters["groups_waiting"] = len(self._waiting)
        return groups

    def _say_for_whom(self, size: int) -> None:
        self._ledger.poll()
        self._status.turn()
        tasks = self._ledger.ledger.of_step(self.step)
        # set directly: the wait began when it began, although its text changes
        self._status.doing = awaited(self.step, self._waiting.arrived(), size, tasks, now_ms())

    def _train(self, groups: Sequence[AssembledGroup], *, wait_s: float) -> None:
        """One step: update, publish, measure, save."""
        step, started = self.step, time.monotonic()
        self._status.turn(f"step {step}: training {len(groups)} groups")
        batch = self._batch(groups) if groups else None
        trained: dict[str, float] = {}
        if batch is not None:
            update = self._ranks.train(groups, batch)
            trained = dict(update.metrics)
            if update.prev_logprobs is not None:
                trained["logprob_error_max"] = logprob_error_max(batch, update.prev_logprobs)
        self._waiting.trained()
        trained_at = time.monotonic()
        if self.step > self._announced:
            self._announce()
        durations = Durations(wait_s, trained_at - started, time.monotonic() - trained_at)
        line = step_metrics(step, groups, batch, trained, durations, at_ms=now_ms())
        self._metrics.append(line)
        self._report(line)
        self._count_zero_updates(line)
        if self.step % self._config.checkpointing.save_period == 0:
            self._save()

    def _batch(self, groups: Sequence[AssembledGroup]) -> TrainingBatch:
        try:
            return self._ranks.batch(groups)
        except ValueError as error:  # the same groups give the same error for ever
            self._declare_fatal(f"step {self.step} can't be trained: {error}")

    def _announce(self) -> None:
        """Exports the weights under a new name and tells the gyms."""
        version = self.step
        self._status.turn(f"publishing version {version}")
        target = weights_path(self._config.weights_directory, version, self._publisher.token)
        self._ranks.export(target, self._publisher.token)
        self._publisher.publish(
            PolicyVersion(version=version, weights_dir=str(target), published_at_ms=now_ms())
        )
        self._announced = version
        self._retention.after_announcement(version)

    def _save(self) -> None:
        """A checkpoint of this moment, recorded on `control`."""
        step = self.step
        self._status.turn(f"saving the checkpoint of step {step}")
        self._control.poll()
        state = self._control.state
        manifest = require_manifest(state, self._config)
        next_task = state.next_task_index
        progress = Progress(
            step=step,
            offsets=self._waiting.offsets(),
            next_task_index=manifest.first_task_index if next_task is None else next_task,
        )
        target = checkpoint_path(self._config.checkpoint_directory, step, self._publisher.token)
        self._ranks.save(target, self._publisher.token, progress)
        self._publisher.publish(
            CheckpointRecorded(
                step=step,
                directory=str(target),
                offsets={str(p): offset for p, offset in progress.offsets.items()},
                next_task_index=progress.next_task_index,
                recorded_at_ms=now_ms(),
            )
        )
        self._saved_step = step
        _log.info("checkpoint of step %d in %s", step, target)
        self._retention.after_checkpoint(step)

    def _finish(self) -> None:
        """Every target is trained."""
        if self._saved_step != self.step:
            self._save()
        self._publisher.publish(Finished(step=self.step, at_ms=now_ms()))
        _log.info("finished after %d steps", self.step)

    def _report(self, line: dict[str, Any]) -> None:
        names = ("reward_mean", "loss", "grad_norm", "staleness", "tokens_per_s", "step_s")
        values = {name: line[name] for name in names if line[name] is not None}
        values |= {f"reward/{agent}": mean for agent, mean in line["reward"].items()}
        values |= {"step": self.step, "version": self._announced}
        values |= {"groups_waiting": len(self._waiting)}
        self._status.counters |= values
        _log.info(
            "step %d: %d groups, reward %s, loss %.5f, staleness %s, waited %.2f s, trained %.2f s",
            line["step"],
            line["groups"],
            line["reward_mean"],
            line["loss"],
            line["staleness"],
            line["wait_s"],
            line["train_s"],
        )

    def _count_zero_updates(self, line: dict[str, Any]) -> None:
        if line["eligible_tokens"] > 0:
            self._zero_updates = 0
            return
        self._zero_updates += 1
        _log.warning("step %d had no eligible token: a zero update", line["step"])
        if self._zero_updates >= MAX_ZERO_UPDATES:
            self._declare_fatal(
                f"{self._zero_updates} steps in a row had no token to train, the last is step "
                f"{line['step']}: {line['groups']} groups, {line['rows']} rows, of which "
                f"{line['masked_rows']} are masked, {line.get('gym/overlong_traces', 0):.0f} "
                "traces are longer than policy.max_total_sequence_length and "
                f"{line.get('gym/multi_trace_rollouts', 0):.0f} rollouts have several traces "
                "without grpo.gym_multi_trace"
            )

    def _declare_fatal(self, message: str) -> NoReturn:
        """Every process of the run stops with `message`."""
        self._publisher.publish(Fatal(role="trainer", message=message, at_ms=now_ms()))
        raise RunStopped(f"the run was stopped by the trainer: {message}")
