"""What is known of a run, folded from heartbeats, `control` and the trainer's metrics. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from schemas.control import ControlState
from schemas.records import Heartbeat

KEPT_HEARTBEATS = 10  # about ten seconds: rates are means over them


@dataclass(frozen=True)
class Step:
    """One line of the trainer's metrics file. A step without groups has no means."""

    step: int
    tasks: list[int]
    reward_mean: float | None
    reward: dict[str, float]
    staleness: float | None
    tokens_per_s: float
    at_ms: int

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Step":
        return cls(
            step=line["step"],
            tasks=line["tasks"],
            reward_mean=line["reward_mean"],
            reward=line["reward"],
            staleness=line.get("staleness"),
            tokens_per_s=line.get("tokens_per_s", 0.0),
            at_ms=line.get("at_ms", 0),
        )


def steps_of(lines: Iterable[bytes]) -> list[Step]:
    """In order, the last line of a step that was trained again after a restore.

    A last line that is only half written is left for the next time.
    """
    steps: dict[int, Step] = {}
    for line in lines:
        if line.endswith(b"\n"):
            step = Step.of(orjson.loads(line))
            steps[step.step] = step
    return [steps[number] for number in sorted(steps)]


@dataclass
class RunFacts:
    """`heartbeats` has the newest few of each process, by role/instance, oldest first."""

    control: ControlState = field(default_factory=ControlState)
    heartbeats: dict[str, deque[Heartbeat]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def hear(self, heartbeat: Heartbeat) -> None:
        """Adds one; those of an earlier incarnation of the same process are let go."""
        key = f"{heartbeat.role}/{heartbeat.instance}"
        recent = self.heartbeats.setdefault(key, deque(maxlen=KEPT_HEARTBEATS))
        if recent and recent[-1].incarnation != heartbeat.incarnation:
            recent.clear()
        recent.append(heartbeat)

    def newest(self, role: str) -> list[Heartbeat]:
        """One of each process of the role, by instance."""
        found = [recent[-1] for _, recent in sorted(self.heartbeats.items()) if recent]
        return [heartbeat for heartbeat in found if heartbeat.role == role]

    def total(self, role: str, counter: str) -> float:
        """Sum over the processes of the role."""
        return sum(heartbeat.counters.get(counter, 0) for heartbeat in self.newest(role))

    def rate(self, role: str, counter: str) -> float:
        """Growth of a cumulative counter a second, over the kept heartbeats of the role."""
        rate = 0.0
        for recent in self.heartbeats.values():
            if not recent or recent[-1].role != role:
                continue
            seconds = (recent[-1].at_ms - recent[0].at_ms) / 1000
            grown = recent[-1].counters.get(counter, 0) - recent[0].counters.get(counter, 0)
            rate += grown / seconds if seconds > 0 else 0.0
        return rate
