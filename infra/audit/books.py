"""The run's books: what was dispatched, what became of it, what was trained. Pure.

Always: dispatched = accepted + abandoned + outstanding, every task in exactly one of them, and
every accepted task trained in one step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from schemas.records import EventKind, GroupEvent, LedgerTotals, Manifest, Purpose

NAMED = 10  # tasks that one sentence names


@dataclass(frozen=True)
class Audit:
    """`lost`, `doubled` and `out_of_order` are counts that must be 0, `problems` sentences."""

    dispatched: int
    accepted: int
    abandoned: dict[str, int]
    outstanding: int
    lost: int
    doubled: int
    out_of_order: int
    rows: int
    groups: int
    trained_steps: int
    problems: list[str]

    @property
    def holds(self) -> bool:
        return not (self.problems or self.lost or self.doubled or self.out_of_order)


@dataclass
class Books:
    """Everything that an audit needs to know, as it is read; close() adds it up.

    `deleted_groups`, `deleted_events`: some were deleted on purpose, below the oldest kept
    checkpoint or the dispatcher's committed offsets, so absence alone proves nothing.
    """

    manifest: Manifest
    totals: LedgerTotals | None = None
    outstanding: set[int] = field(default_factory=set)
    rows: int = 0
    groups: Counter[int] = field(default_factory=Counter)
    targets: dict[int, int] = field(default_factory=dict)
    validation: set[int] = field(default_factory=set)
    accepted: Counter[int] = field(default_factory=Counter)
    abandoned: Counter[int] = field(default_factory=Counter)
    out_of_order: int = 0
    deleted_groups: bool = False
    deleted_events: bool = False
    flaws: list[str] = field(default_factory=list)

    def enter_group(self, task_index: int, target_step: int, purpose: Purpose) -> None:
        self.groups[task_index] += 1
        self.targets[task_index] = target_step
        if purpose is Purpose.VALIDATION:
            self.validation.add(task_index)

    def enter_event(self, event: GroupEvent) -> None:
        if event.kind is EventKind.ACCEPTED:
            self.accepted[event.task_index] += 1
        elif event.kind is EventKind.ABANDONED:
            self.abandoned[event.task_index] += 1

    def close(self, trained: Iterable[tuple[int, list[int]]], *, finished: bool) -> Audit:
        """`trained` has the tasks of each step, a step that was trained again more than once."""
        steps, contradictions = _steps(trained)
        step_of = {task: step for step, tasks in steps.items() for task in tasks}
        lost, doubled = self._lost(set(step_of)), self._doubled(steps)
        totals = self.totals or LedgerTotals(next_task_index=self.manifest.first_task_index)
        problems = [
            *self.flaws,
            *contradictions,
            *self._sum_flaws(totals, finished=finished),
            *self._training_flaws(step_of, steps, finished=finished),
        ]
        if lost:
            problems.append(f"{len(lost)} tasks are lost: {_some(lost)}")
        if doubled:
            problems.append(f"{len(doubled)} tasks came twice: {_some(doubled)}")
        return Audit(
            dispatched=totals.dispatched,
            accepted=totals.accepted,
            abandoned=dict(totals.abandoned),
            outstanding=len(self.outstanding),
            lost=len(lost),
            doubled=len(doubled),
            out_of_order=self.out_of_order,
            rows=self.rows,
            groups=self.groups.total(),
            trained_steps=len(steps),
            problems=problems,
        )

    def _lost(self, trained: set[int]) -> set[int]:
        """Dispatched tasks that ended nowhere, and accepted ones whose group is nowhere."""
        there = set(self.groups) | trained
        gone = set() if self.deleted_groups else set(self.accepted) - there
        if self.totals is None or self.deleted_events:
            return gone
        dispatched = range(self.manifest.first_task_index, self.totals.next_task_index)
        ended = there | set(self.accepted) | set(self.abandoned) | self.outstanding
        return gone | (set(dispatched) - ended)

    def _doubled(self, steps: Mapping[int, list[int]]) -> set[int]:
        """Tasks with two groups, two ends, or two steps."""
        in_steps = Counter(task for tasks in steps.values() for task in tasks)
        ends = self.accepted + self.abandoned
        found = (self.groups, ends, in_steps)
        grouped_yet_abandoned = set(self.groups) & set(self.abandoned)
        return grouped_yet_abandoned | {t for c in found for t, count in c.items() if count > 1}

    def _sum_flaws(self, totals: LedgerTotals, *, finished: bool) -> list[str]:
        flaws = []
        abandoned = sum(totals.abandoned.values())
        if totals.dispatched != totals.accepted + abandoned + len(self.outstanding):
            flaws.append(
                f"the ledger does not add up: dispatched {totals.dispatched}, accepted "
                f"{totals.accepted}, abandoned {abandoned}, outstanding {len(self.outstanding)}"
            )
        if self.deleted_events or not finished:
            return flaws  # the ledger may be a moment behind the events
        if totals.accepted != self.accepted.total() or abandoned != self.abandoned.total():
            flaws.append(
                f"the ledger counts {totals.accepted} accepted and {abandoned} abandoned tasks, "
                f"`events` {self.accepted.total()} and {self.abandoned.total()}"
            )
        return flaws

    def _training_flaws(
        self, step_of: Mapping[int, int], steps: Mapping[int, list[int]], *, finished: bool
    ) -> list[str]:
        flaws = []
        for task, step in step_of.items():
            target = self.targets.get(task)
            if target is None and not self.deleted_groups:
                flaws.append(f"step {step} trained task {task}, which has no group")
            elif target is not None and target != step:
                flaws.append(f"step {step} trained task {task}, whose target is step {target}")
        last = max(steps, default=-1)
        untrained = {
            task
            for task, target in self.targets.items()
            if task not in step_of and task not in self.validation and (finished or target <= last)
        }
        if untrained:
            flaws.append(f"{len(untrained)} accepted groups were never trained: {_some(untrained)}")
        return flaws


def _steps(trained: Iterable[tuple[int, list[int]]]) -> tuple[dict[int, list[int]], list[str]]:
    """The tasks of each step; a sentence for each step whose repetition had other tasks."""
    steps: dict[int, list[int]] = {}
    flaws = []
    for step, tasks in trained:
        if steps.setdefault(step, tasks) != tasks:
            flaws.append(f"step {step} was trained with {steps[step]}, then again with {tasks}")
    return steps, flaws


def _some(tasks: set[int]) -> str:
    named = ", ".join(str(task) for task in sorted(tasks)[:NAMED])
    return named + (", ..." if len(tasks) > NAMED else "")
