"""What the screen shows, decided from the facts. Pure: no terminal, no clock."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from infra.screen.facts import RunFacts
from schemas.records import Heartbeat

SILENT_S = 5.0  # heartbeats come every second
_WAITS = re.compile(r"\bwaiting\b|\d+ of \d+ groups")  # the words of the roles' status lines
STALLED_S = 10.0  # a main loop turns many times a second


@dataclass(frozen=True)
class Process:
    """A process as its supervisor knows it. `key` is role/instance on `status`.

    `lived_s`: since its last start; what it said before that was another's word.
    """

    name: str
    key: str
    state: str
    restarts: int = 0
    lived_s: float = math.inf

    def has_spoken(self, facts: RunFacts, now_ms: int) -> bool:
        """Whether a heartbeat came since its last start."""
        recent = facts.heartbeats.get(self.key)
        if not recent:
            return False
        return now_ms - recent[-1].at_ms <= self.lived_s * 1000


@dataclass(frozen=True)
class RoleLine:
    """`doing` is the process's own word, `since_s` how long it has been at it."""

    name: str
    state: str
    doing: str
    since_s: float | None
    restarts: int
    troubled: bool


@dataclass(frozen=True)
class View:
    """`rewards` has the mean reward of each step, by agent; "all" is the mean over all rows."""

    run_id: str
    step: int
    total_steps: int
    elapsed_s: float
    rewards: dict[str, list[float]]
    groups_dispatched: int
    groups_accepted: int
    groups_abandoned: int
    rows_in_flight: int
    staleness: float | None
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    awaited: str
    roles: list[RoleLine]
    notice: str


def view_of(
    facts: RunFacts,
    processes: Sequence[Process],
    *,
    run_id: str,
    total_steps: int,
    elapsed_s: float,
    now_ms: int,
    notice: str = "",
) -> View:
    last = facts.steps[-1] if facts.steps else None
    return View(
        run_id=run_id,
        step=max(facts.control.highest_version, last.step + 1 if last else 0, 0),
        total_steps=_total(facts, total_steps),
        elapsed_s=elapsed_s,
        rewards=_rewards(facts),
        groups_dispatched=int(facts.total("dispatcher", "dispatched")),
        groups_accepted=int(facts.total("dispatcher", "accepted")),
        groups_abandoned=int(facts.total("dispatcher", "abandoned")),
        rows_in_flight=int(facts.total("gym-shard", "rows_in_flight")),
        staleness=last.staleness if last else None,
        generated_tokens_per_s=facts.rate("gym-shard", "sampled_tokens"),
        trained_tokens_per_s=last.tokens_per_s if last else 0.0,
        awaited=_awaited(facts, processes, now_ms),
        roles=[_role_line(facts, process, now_ms) for process in processes],
        notice=notice,
    )


def trouble_of(heartbeat: Heartbeat, now_ms: int) -> str:
    """Why a process counts as silent or stalled; empty when it is well, or ends."""
    if heartbeat.doing.startswith("ended"):
        return ""  # its last word; its libraries may still take seconds to go
    silent_s = (now_ms - heartbeat.at_ms) / 1000
    if silent_s > SILENT_S:
        return f"silent for {silent_s:.0f} s"
    stalled_s = (heartbeat.at_ms - heartbeat.loop_at_ms) / 1000
    if stalled_s > STALLED_S:
        return f"its main loop has not turned for {stalled_s:.0f} s"
    return ""


def _total(facts: RunFacts, total_steps: int) -> int:
    """The data may end before max_num_steps."""
    last_target = facts.control.last_target
    return total_steps if last_target is None else min(total_steps, last_target + 1)


def _rewards(facts: RunFacts) -> dict[str, list[float]]:
    agents = sorted({agent for step in facts.steps for agent in step.reward})
    rewards = {
        agent: [step.reward[agent] for step in facts.steps if agent in step.reward]
        for agent in agents
    }
    means = [step.reward_mean for step in facts.steps if step.reward_mean is not None]
    if means:
        rewards = {"all": means} | rewards
    return rewards


def _awaited(facts: RunFacts, processes: Sequence[Process], now_ms: int) -> str:
    """Who has not begun, else what the trainer waits for, else who has waited the longest."""
    running = [process for process in processes if process.state == "running"]
    if new := [process.name for process in running if not process.has_spoken(facts, now_ms)]:
        return f"the start of {', '.join(new)}"
    for role in ("trainer", "assembler", "gym-shard", "dispatcher"):
        waiting = [h for h in facts.newest(role) if _WAITS.search(h.doing)]
        if waiting:
            longest = min(waiting, key=lambda heartbeat: heartbeat.doing_since_ms)
            since_s = max(0, now_ms - longest.doing_since_ms) / 1000
            return f"{role} {longest.instance}: {longest.doing} ({since_s:.0f} s)"
    return "nobody"


def _role_line(facts: RunFacts, process: Process, now_ms: int) -> RoleLine:
    if not process.has_spoken(facts, now_ms):
        doing = "starting" if process.state == "running" else ""
        return RoleLine(process.name, process.state, doing, None, process.restarts, False)
    heartbeat = facts.heartbeats[process.key][-1]
    trouble = trouble_of(heartbeat, now_ms) if process.state == "running" else ""
    since_s = max(0, now_ms - heartbeat.doing_since_ms) / 1000
    doing = trouble or heartbeat.doing
    return RoleLine(
        process.name, process.state, doing, since_s, process.restarts, troubled=bool(trouble)
    )
