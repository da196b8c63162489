"""What the dispatcher does next: events and policy versions in, decisions out. Pure.

        attempt_failed ─▶ waiting ── 1, 2, 4 s ──▶ dispatched again (attempt + 1)
    dispatched ──┤           │ env.max_attempts failures
                 │           ▼
                 │      cancelling ── the assembler answers ──┐
                 ▼                                            ▼
        accepted: the slot is filled             abandoned: the slot takes a fresh prompt

Always, after every step: dispatched = accepted + abandoned + outstanding, and no slot of the
targets v..v+lead has two tasks. The ledger holds all of it; only the clock of a backoff does not.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from producers.decisions import (
    DeclareFatal,
    DeclareLastTarget,
    DeclareTargetSize,
    RequestCancel,
    SendPrompt,
    Written,
)
from producers.ledger import Ledger
from producers.routing import Router
from producers.slots import uncovered, window
from schemas.records import EventKind, GroupEvent, LedgerTask, TaskState

STALE = "stale"
STALE_ALLOWED = 2  # from the third in a row on, being stale is a failure
SHARD_LOST = "shard_lost"
ORDINAL_WINDOW = 16_000  # the assembler turns away rows more than 16,384 above its watermark
LONGEST_BACKOFF_S = 60.0

logger = logging.getLogger(__name__)


class Catalog(Protocol):
    """The prompts of the dataset, in the order of each epoch."""

    def __len__(self) -> int:
        """Prompts of one epoch, at least 1."""

    def agent_of(self, epoch: int, position: int) -> str:
        """The agent of a prompt; `position` is below len()."""


@dataclass(frozen=True)
class Rules:
    """The run's frozen values and the limits of the configuration."""

    first_step: int
    first_task_index: int
    num_partitions: int
    slots: int
    """N: groups of a step"""
    group_size: int
    """G: rows of a group"""
    lead: int
    max_age: int
    max_attempts: int
    max_failures: int
    """More tasks than this abandoned in a row are fatal"""
    max_epochs: int
    max_steps: int


def backoff_s(failures: int) -> float:
    """Seconds before the attempt that follows the `failures`-th failure: 1, 2, 4, ..."""
    return min(LONGEST_BACKOFF_S, 2.0 ** (failures - 1))


class Planner:
    """Feed it with `on_version` and `on_event`, then carry out what `plan` says."""

    def __init__(
        self, rules: Rules, ledger: Ledger, router: Router, catalog: Catalog, now_s: float
    ) -> None:
        self.ledger = ledger
        self.version: int | None = None
        self.attempts_failed = 0
        self._rules = rules
        self._router = router
        self._catalog = catalog
        self._fatal: DeclareFatal | None = None
        self._fatal_declared = False
        self._due_s = {
            task.task_index: now_s + _wait_s(task)
            for task in ledger.tasks.values()
            if task.state is TaskState.WAITING
        }
        # A cancel that was asked for before a restart is asked for again: it may never have left.
        self._cancels = [
            RequestCancel(task)
            for task in ledger.tasks.values()
            if task.state is TaskState.CANCELLING
        ]

    @property
    def prompts_left(self) -> bool:
        """False for good once a target was declared short: the trainer counts on that."""
        totals = self.ledger.totals
        return totals.epoch < self._rules.max_epochs and not totals.short_targets

    @property
    def next_due_s(self) -> float | None:
        """When the next backoff ends, on the clock of `now_s`."""
        return min(self._due_s.values(), default=None)

    def on_version(self, version: int) -> None:
        """Optimizer steps done, as announced; it never falls."""
        self.version = version

    def on_event(self, event: GroupEvent, now_s: float) -> None:
        """Folds one event of the assembler. Of tasks that have ended, it changes nothing."""
        task = self.ledger.tasks.get(event.task_index)
        if task is None:
            return
        match event.kind:
            case EventKind.ACCEPTED:
                self._due_s.pop(task.task_index, None)
                self.ledger.accept(task.task_index)
            case EventKind.ABANDONED:
                self._abandon(task, event)
            case EventKind.ATTEMPT_FAILED:
                if is_current(task, event):
                    self._fail(task, event, now_s)

    def plan(self, now_s: float, now_ms: int) -> list[Written]:
        """Everything that is due now; the ledger already holds it."""
        if self._fatal_declared or self.version is None:
            return []
        if self._fatal is not None:
            self._fatal_declared = True
            self.ledger.note(failures_in_a_row=0)  # whoever resumes the run allows them anew
            return [self._fatal]
        self.ledger.forget_targets_below(self.version)
        return [
            *self._repeats(now_s, now_ms),
            *self._fresh(self.version, now_ms),
            *self._ends(self.version),
        ]

    def take_cancels(self) -> list[RequestCancel]:
        """Requests to send once the ledger is committed."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def _abandon(self, task: LedgerTask, event: GroupEvent) -> None:
        self._due_s.pop(task.task_index, None)
        reason = event.reason or task.reason or "unknown"
        self.ledger.abandon(task.task_index, reason)
        in_a_row = self.ledger.totals.failures_in_a_row
        logger.warning(
            "task %d (agent %s, target %d) was abandoned: %s; %d in a row",
            task.task_index, task.agent, task.target_step, reason, in_a_row,
        )  # fmt: skip
        if in_a_row > self._rules.max_failures and self._fatal is None:
            self._fatal = DeclareFatal(
                f"task {task.task_index} of agent {task.agent} on shard {task.shard} was abandoned "
                f"({reason}) after {task.failures} failed attempts"
                f"{': ' + event.message if event.message else ''}. That makes {in_a_row} in a row, "
                f"and grpo.async_grpo.max_generation_failures allows {self._rules.max_failures}. "
                "Look for the attempts' errors in the log of the shard, then `groupstream resume`"
            )

    def _fail(self, task: LedgerTask, event: GroupEvent, now_s: float) -> None:
        self.attempts_failed += 1
        logger.warning(
            "task %d attempt %d on %s/%d failed: %s: %s",
            task.task_index, task.attempt, task.shard, task.replica, event.reason, event.message,
        )  # fmt: skip
        stale = task.stale_in_a_row + 1 if event.reason == STALE else 0
        forgiven = 0 < stale <= STALE_ALLOWED
        failed = replace(
            task,
            failures=task.failures if forgiven else task.failures + 1,
            stale_in_a_row=stale,
            alone=event.reason == SHARD_LOST,
            reason=event.reason,
        )
        if failed.failures >= self._rules.max_attempts:
            cancelling = replace(failed, state=TaskState.CANCELLING)
            self.ledger.put(cancelling)
            self._cancels.append(RequestCancel(cancelling))
            return
        waiting = replace(failed, state=TaskState.WAITING)
        self.ledger.put(waiting)
        self._due_s[task.task_index] = now_s + _wait_s(waiting)

    def _repeats(self, now_s: float, now_ms: int) -> list[Written]:
        due = sorted(index for index, due_s in self._due_s.items() if due_s <= now_s)
        return [self._repeat(self.ledger.tasks[index], now_ms) for index in due]

    def _repeat(self, task: LedgerTask, now_ms: int) -> SendPrompt:
        del self._due_s[task.task_index]
        again = replace(
            task,
            attempt=task.attempt + 1,
            state=TaskState.DISPATCHED,
            reason="",
            dispatched_at_ms=now_ms,
        )
        again = self._placed(again, avoid=task.replica)
        self.ledger.put(again)
        return SendPrompt(again)

    def _fresh(self, version: int, now_ms: int) -> list[Written]:
        """A task for every uncovered slot, as long as there are prompts and ordinals."""
        rules, ledger = self._rules, self.ledger
        last = ledger.totals.last_target
        targets = window(version, rules.lead, rules.max_steps - 1 if last is None else last)
        lowest = ledger.lowest_ordinals(rules.num_partitions)
        sent: list[Written] = []
        for target, slot in uncovered(targets, rules.slots, ledger.covered()):
            ordinal, partition = divmod(ledger.totals.next_task_index, rules.num_partitions)
            too_far = ordinal - lowest.setdefault(partition, ordinal) > ORDINAL_WINDOW
            if too_far or not self.prompts_left:
                break
            sent.append(self._send_next(target, slot, now_ms))
        return sent

    def _send_next(self, target: int, slot: int, now_ms: int) -> SendPrompt:
        totals = self.ledger.totals
        task = LedgerTask(
            task_index=totals.next_task_index,
            attempt=0,
            target_step=target,
            epoch=totals.epoch,
            position=totals.position,
            agent=self._catalog.agent_of(totals.epoch, totals.position),
            shard="",
            replica=-1,
            partition=-1,
            seq=-1,
            min_version=max(self._rules.first_step, target - self._rules.max_age),
            rowidx_start=slot * self._rules.group_size,
            dispatched_at_ms=now_ms,
        )
        task = self._placed(task, avoid=None)
        self.ledger.add(task)
        self._advance()
        return SendPrompt(task)

    def _placed(self, task: LedgerTask, avoid: int | None) -> LedgerTask:
        """The task with a route and the next sequence number of its prompts partition."""
        totals = self.ledger.totals
        route, cursor = self._router.route(task.agent, totals.next_replica, avoid)
        partition = f"{route.shard}/{route.partition}"
        seq = totals.next_seq.get(partition, 0)
        self.ledger.note(
            next_replica=totals.next_replica | {route.shard: cursor},
            next_seq=totals.next_seq | {partition: seq + 1},
        )
        return replace(
            task, shard=route.shard, replica=route.replica, partition=route.partition, seq=seq
        )

    def _advance(self) -> None:
        """The dataset cursor moves to the next prompt; past the last epoch there is none."""
        totals = self.ledger.totals
        if totals.position + 1 < len(self._catalog):
            self.ledger.note(position=totals.position + 1)
        else:
            self.ledger.note(epoch=totals.epoch + 1, position=0)

    def _ends(self, version: int) -> list[Written]:
        """What the trainer must know once prompts or steps have run out."""
        covered = self.ledger.covered()
        totals = self.ledger.totals
        declared: list[Written] = []
        last = totals.last_target
        if last is None and (last := self._last_target(version, covered)) is not None:
            self.ledger.note(last_target=last)
            declared.append(DeclareLastTarget(last))
        if last is None or self.prompts_left:
            return declared
        short = dict(totals.short_targets)
        for target in window(version, self._rules.lead, last):
            groups = covered.get(target, 0).bit_count()
            if groups < self._rules.slots and short.get(str(target)) != groups:
                short[str(target)] = groups
                declared.append(DeclareTargetSize(target, groups))
        if short != totals.short_targets:
            self.ledger.note(short_targets=short)
        return declared

    def _last_target(self, version: int, covered: dict[int, int]) -> int | None:
        """The last step, as soon as it is certain; every target below `version` is trained."""
        rules = self._rules
        if rules.max_steps <= rules.first_step:
            return rules.first_step - 1
        highest = max(version - 1, *covered, rules.first_step - 1)
        if highest >= rules.max_steps - 1 or not self.prompts_left:
            return highest
        return None


def is_current(task: LedgerTask, event: GroupEvent) -> bool:
    """Whether an event is about the attempt that is out now."""
    return task.state is TaskState.DISPATCHED and event.attempt == task.attempt


def _wait_s(task: LedgerTask) -> float:
    """Stale prompts go out again at once: nothing is wrong with them."""
    forgiven = task.reason == STALE and task.stale_in_a_row <= STALE_ALLOWED
    return 0.0 if forgiven else backoff_s(task.failures)
