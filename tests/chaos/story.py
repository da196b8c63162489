"""What `events` and `dlq` tell of a run, and whether the faults and the gym explain it. Pure."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.inspection.letters import Letter
from schemas.records import EventKind, GroupEvent
from tests.chaos.deeds import Deed
from tests.chaos.gym import Script
from tests.chaos.schedule import Action

AFTERMATH_MS = 60_000  # a fault's last failure: silence, deadline and backoffs come after it
OUTAGE_MS = 60_000  # until a broker that dies, of a full disk at the slowest, is back
TERMINAL = (EventKind.ACCEPTED, EventKind.ABANDONED)
OF_FAULTS = (
    "shard_lost",
    "lost_start",
    "deadline",
    "commit_unknown",
)
"""Reasons of failed attempts that only a fault brings about"""


@dataclass
class Story:
    """`at_ms` everywhere is the broker's word: the roles' clocks may jump."""

    kinds: Counter[str] = field(default_factory=Counter)
    accepted_ms: list[int] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    abandoned: dict[int, GroupEvent] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    failures: dict[int, list[tuple[int, GroupEvent]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    letters: Counter[str] = field(default_factory=Counter)
    origins: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def enter_event(self, event: GroupEvent, at_ms: int) -> None:
        self.kinds[event.kind.value] += 1
        if event.kind in TERMINAL:
            self.ends[event.task_index] += 1
        if event.kind is EventKind.ACCEPTED:
            self.accepted_ms.append(at_ms)
        elif event.kind is EventKind.ABANDONED:
            self.abandoned[event.task_index] = event
        elif event.kind is EventKind.ATTEMPT_FAILED:
            self.failed[event.reason] += 1
            self.failures[event.task_index].append((at_ms, event))

    def enter_letter(self, letter: Letter) -> None:
        self.letters[letter.reason] += 1
        if letter.origin is not None:
            self.origins[letter.origin_topic, *letter.origin] += 1

    def flaws(self, script: Callable[[int, int], Script], deeds: Sequence[Deed]) -> list[str]:
        """`script`: what the gym does with a task's attempt. One sentence each."""
        # Nobody sends a bad record: each dead letter is an attempt that ran twice, or worse.
        flaws = [f"{count} records are in dlq: {reason}" for reason, count in self.letters.items()]
        flaws += [
            f"the record {origin} is in dlq {count} times"
            for origin, count in self.origins.items()
            if count > 1
        ]
        flaws += [
            f"task {task} has {count} terminal events"
            for task, count in sorted(self.ends.items())
            if count > 1
        ]
        flaws += [
            f"task {task} was abandoned ({ended.reason}), unexplained: no attempt failed for the "
            f"reason {ended.reason}"
            for task, ended in sorted(self.abandoned.items())
            if ended.reason not in {event.reason for _, event in self.failures.get(task, [])}
        ]
        return flaws + self._unexplained(script, deeds)

    def _unexplained(
        self, script: Callable[[int, int], Script], deeds: Sequence[Deed]
    ) -> list[str]:
        """Failed attempts that are neither the script's nor the schedule's, however they end."""
        return [
            f"task {task} attempt {event.attempt} failed, unexplained: {event.reason}: "
            f"{event.message}"
            for task, failures in sorted(self.failures.items())
            for at_ms, event in failures
            if not is_explained(event, at_ms, script(task, event.attempt), deeds)
        ]


def is_explained(event: GroupEvent, at_ms: int, script: Script, deeds: Sequence[Deed]) -> bool:
    if event.reason == "gym_error":
        return script.fails
    if event.reason == "stale":
        return script.is_stale or any(_covers(deed, at_ms) for deed in deeds)
    return event.reason in OF_FAULTS and any(_covers(deed, at_ms) for deed in deeds)


def _covers(deed: Deed, at_ms: int) -> bool:
    outage_ms = OUTAGE_MS if deed.action in (Action.BROKER, Action.DISK) else 0
    return deed.at_ms <= at_ms <= deed.end_ms + outage_ms + AFTERMATH_MS


def longest_recovery_s(begins_ms: Sequence[int], accepted_ms: Sequence[int]) -> float | None:
    """From a fault to the next accepted group; faults that none follows do not count."""
    ordered = sorted(accepted_ms)
    nexts = [(begin, bisect_left(ordered, begin)) for begin in begins_ms]
    waits = [ordered[at] - begin for begin, at in nexts if at < len(ordered)]
    return max(waits) / 1000 if waits else None


def recoveries_s(deeds: Sequence[Deed], accepted_ms: Sequence[int]) -> dict[str, float]:
    """The longest of each kind of fault."""
    begins: dict[str, list[int]] = defaultdict(list)
    for deed in deeds:
        begins[deed.action.value].append(deed.at_ms)
    found = {kind: longest_recovery_s(at, accepted_ms) for kind, at in begins.items()}
    return {kind: seconds for kind, seconds in sorted(found.items()) if seconds is not None}
