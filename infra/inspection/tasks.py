"""Where every task of a run stands, folded from ledger, events, groups and open rows. Pure.

Read in this order: the ledger first, so that what it calls ended is in the events read after it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from infra.inspection.stored import Stored, decoded
from schemas.records import (
    AssembledGroup,
    EventKind,
    GroupEvent,
    LedgerTask,
    LedgerTotals,
    Purpose,
    RolloutRow,
    TaskState,
)


class Standing(StrEnum):
    """`trained`: accepted, and its step is in the newest checkpoint. `forgotten`: ended, and the
    records that say how are deleted. `not_dispatched`: no task of the run, though records name it.
    """

    ACCEPTED = "accepted"
    TRAINED = "trained"
    ABANDONED = "abandoned"
    OPEN = "open"
    DISPATCHED = "dispatched"
    WAITING = "waiting"
    CANCELLING = "cancelling"
    FORGOTTEN = "forgotten"
    NOT_DISPATCHED = "not_dispatched"

    @property
    def is_accepted(self) -> bool:
        return self in (Standing.ACCEPTED, Standing.TRAINED)


ENDED = (Standing.ACCEPTED, Standing.TRAINED, Standing.ABANDONED, Standing.FORGOTTEN)


@dataclass(frozen=True, slots=True)
class TaskLine:
    """`attempt`: the one that ended the task, else the current one. -1, "" and None: unknown.

    `rows`: distinct rows of that attempt that arrived, of `group_size`. `at_ms`: since when.
    """

    task: int
    purpose: Purpose
    target_step: int
    attempt: int
    standing: Standing
    reason: str
    message: str
    rows: int | None
    group_size: int
    agent: str
    shard: str
    replica: int
    at_ms: int | None


@dataclass(frozen=True)
class Sums:
    """dispatched = accepted + abandoned + outstanding + forgotten, always."""

    dispatched: int
    accepted: int
    trained: int
    """Of the accepted ones"""
    abandoned: dict[str, int]
    outstanding: int
    forgotten: int


@dataclass(slots=True)
class _Task:
    ledger: LedgerTask | None = None  # its last one, also after its tombstone
    is_released: bool = False  # by a tombstone: the ledger knows that it ended
    end: GroupEvent | AssembledGroup | None = None
    started: dict[int, GroupEvent] = field(default_factory=dict)
    failed: dict[int, GroupEvent] = field(default_factory=dict)
    rows: dict[int, dict[int, RolloutRow]] = field(default_factory=dict)
    row_at_ms: int | None = None
    agent: str = ""

    @property
    def attempt(self) -> int:
        return max([_ledger_attempt(self), *self.started, *self.failed, *self.rows])


class TaskBook:
    """`trained_steps`: optimizer steps that the newest checkpoint holds. Step v trains target v."""

    def __init__(self, first_task_index: int, group_size: int, trained_steps: int) -> None:
        self.totals: LedgerTotals | None = None
        self._first, self._group_size, self._trained = first_task_index, group_size, trained_steps
        self._tasks: dict[int, _Task] = {}

    @property
    def next_task_index(self) -> int:
        """Tasks from here on were not dispatched when the ledger was read."""
        return self._first if self.totals is None else self.totals.next_task_index

    def enter_ledger(self, stored: Stored) -> None:
        match decoded(stored.value):
            case LedgerTotals() as totals:
                self.totals = totals
            case LedgerTask() as task:
                self._task(task.task_index).ledger = task
            case None if stored.value is None and stored.key is not None:
                self._task(int(stored.key)).is_released = True

    def enter_event(self, event: GroupEvent) -> None:
        task = self._task(event.task_index)
        match event.kind:
            case EventKind.ACCEPTED | EventKind.ABANDONED:
                task.end = event
            case EventKind.STARTED:
                task.started[event.attempt] = event
            case EventKind.ATTEMPT_FAILED:
                task.failed[event.attempt] = event

    def enter_group(self, group: AssembledGroup) -> None:
        task = self._task(group.task_index)
        task.end = task.end or group
        task.agent = group.rows[0].agent if group.rows else ""

    def enter_row(self, row: RolloutRow, at_ms: int) -> None:
        """A row that was dispatched, at the time of its arrival."""
        task = self._task(row.task_index)
        task.agent = task.agent or row.agent
        task.row_at_ms = at_ms if task.row_at_ms is None else min(at_ms, task.row_at_ms)
        if 0 <= row.row_index < row.group_size:
            task.rows.setdefault(row.attempt, {}).setdefault(row.row_index, row)

    def knows(self, task_index: int) -> bool:
        return task_index in self._tasks or self._first <= task_index < self.next_task_index

    def lines(self) -> list[TaskLine]:
        """Every task that was dispatched or heard of, by task_index."""
        dispatched = range(self._first, self.next_task_index)
        return [self.line(index) for index in sorted({*dispatched, *self._tasks})]

    def line(self, task_index: int) -> TaskLine:
        task = self._tasks.get(task_index, _Task())
        end = task.end
        attempt = task.attempt if end is None else end.attempt
        standing = Standing.NOT_DISPATCHED
        if self.knows(task_index):
            standing = self._standing(task, attempt)
        told = end or task.failed.get(attempt) or task.started.get(attempt)
        known = told or task.ledger or _any(task.rows.get(attempt, {}))
        shard, replica = _host(task, attempt)
        event = told if isinstance(told, GroupEvent) else None
        reason = "" if event is None else event.reason
        if task.ledger is not None and standing in (Standing.WAITING, Standing.CANCELLING):
            reason = reason or task.ledger.reason
        return TaskLine(
            task=task_index,
            purpose=Purpose.TRAIN if known is None else known.purpose,
            target_step=-1 if known is None else known.target_step,
            attempt=attempt,
            standing=standing,
            reason=reason,
            message="" if event is None else event.message,
            rows=self._arrived(task, attempt, standing),
            group_size=getattr(known, "group_size", self._group_size),
            agent=task.agent or (task.ledger.agent if task.ledger else ""),
            shard=shard,
            replica=replica,
            at_ms=_at_ms(task, attempt),
        )

    def _task(self, task_index: int) -> _Task:
        return self._tasks.setdefault(task_index, _Task())

    def _standing(self, task: _Task, attempt: int) -> Standing:
        match task.end:
            case GroupEvent(kind=EventKind.ABANDONED):
                return Standing.ABANDONED
            case GroupEvent() | AssembledGroup() as end:
                trains = end.purpose is Purpose.TRAIN and end.target_step < self._trained
                return Standing.TRAINED if trains else Standing.ACCEPTED
        return _unended(task, attempt)

    def _arrived(self, task: _Task, attempt: int, standing: Standing) -> int | None:
        """Only the rows of open tasks are read again; those of a whole group were all there."""
        if standing.is_accepted and task.end is not None:
            return task.end.group_size
        return None if standing in ENDED else len(task.rows.get(attempt, {}))


def selected(
    lines: Iterable[TaskLine], standing: Standing | None, target_step: int | None
) -> list[TaskLine]:
    """None does not restrict; accepted includes trained."""
    either = (standing, Standing.TRAINED) if standing is Standing.ACCEPTED else (standing,)
    return [
        line
        for line in lines
        if (standing is None or line.standing in either) and target_step in (None, line.target_step)
    ]


def sums_of(lines: Iterable[TaskLine]) -> Sums:
    standings = Counter[Standing]()
    abandoned = Counter[str]()
    for line in lines:
        standings[line.standing] += 1
        if line.standing is Standing.ABANDONED:
            abandoned[line.reason or "unknown"] += 1
    return Sums(
        dispatched=standings.total(),
        accepted=standings[Standing.ACCEPTED] + standings[Standing.TRAINED],
        trained=standings[Standing.TRAINED],
        abandoned=dict(abandoned.most_common()),
        outstanding=sum(count for standing, count in standings.items() if standing not in ENDED),
        forgotten=standings[Standing.FORGOTTEN],
    )


def _unended(task: _Task, attempt: int) -> Standing:
    heard_of = task.ledger or task.started or task.failed or task.rows
    if task.is_released or not heard_of:
        return Standing.FORGOTTEN
    state = None if task.ledger is None else task.ledger.state
    if state is TaskState.CANCELLING:
        return Standing.CANCELLING
    known_failed = state is TaskState.WAITING and attempt == _ledger_attempt(task)
    if attempt in task.failed or known_failed:
        return Standing.WAITING
    if attempt in task.started or attempt in task.rows:
        return Standing.OPEN
    return Standing.DISPATCHED


def _ledger_attempt(task: _Task) -> int:
    return -1 if task.ledger is None else task.ledger.attempt


def _host(task: _Task, attempt: int) -> tuple[str, int]:
    """The shard and replica that ran the attempt, else those that it was sent to."""
    events = [task.end, task.failed.get(attempt), task.started.get(attempt)]
    for event in events:
        if isinstance(event, GroupEvent) and event.shard:
            return event.shard, event.replica
    row = _any(task.rows.get(attempt, {}))
    if row is None and isinstance(task.end, AssembledGroup):
        row = next(iter(task.end.rows), None)
    if row is not None:
        return row.shard, row.replica
    return (task.ledger.shard, task.ledger.replica) if task.ledger else ("", -1)


def _at_ms(task: _Task, attempt: int) -> int | None:
    match task.end or task.failed.get(attempt) or task.started.get(attempt):
        case GroupEvent(at_ms=at_ms):
            return at_ms
        case AssembledGroup(accepted_at_ms=at_ms):
            return at_ms
    return task.ledger.dispatched_at_ms if task.ledger else task.row_at_ms


def _any(rows: Mapping[int, RolloutRow]) -> RolloutRow | None:
    return next(iter(rows.values()), None)
