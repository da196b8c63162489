"""Who is killed or stopped when: a list of faults from a seed. Pure.

Every fault is drawn before the run begins, so the same seed, length and mode give the same list.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GAP_S = (2.0, 4.0)  # between two faults of roles
SESSION_S = 5.0  # what the run's consumers are given; a stop is longer
STOP_S = (6.0, 13.0)  # from beyond the session to beyond the transactions and a shard's silence
REPLACED = 0.4  # the share of the stopped that have a successor before they wake
BROKER_EVERY_S = 45.0
MOST_STOPPED = 2  # at a time: with more of them nothing would move


class Action(StrEnum):
    KILL = "kill"
    STOP = "stop"
    REPLACE = "replace"  # stopped, and another process of the same role starts meanwhile
    BROKER = "broker"


@dataclass(frozen=True)
class Fault:
    """`at_s` counts from the schedule's begin; who is stopped wakes `for_s` later."""

    at_s: float
    action: Action
    role: str
    for_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s


@dataclass(frozen=True)
class Mode:
    """`stops` is the share of roles' faults that stop them, None for no fault of roles at all."""

    stops: float | None
    broker: bool


MODES = {
    "mixed": Mode(stops=0.25, broker=True),
    "kill": Mode(stops=0.0, broker=False),
    "stop": Mode(stops=1.0, broker=False),
    "broker": Mode(stops=None, broker=True),
    "quiet": Mode(stops=None, broker=False),
}


def make_schedule(seed: int, seconds: float, roles: Sequence[str], mode: str) -> list[Fault]:
    """By time. Every stop ends within `seconds`; a role that is stopped is left alone."""
    chosen = MODES[mode]
    chance = random.Random(f"{seed} {seconds:g} {mode}")
    faults = [] if chosen.stops is None else _of_roles(chance, seconds, roles, chosen.stops)
    if chosen.broker:
        faults += _of_broker(chance, seconds)
    return sorted(faults, key=lambda fault: fault.at_s)


def _of_roles(
    chance: random.Random, seconds: float, roles: Sequence[str], stops: float
) -> list[Fault]:
    faults: list[Fault] = []
    at_s = chance.uniform(*GAP_S)
    while at_s < seconds:
        stopped = {f.role for f in faults if f.for_s and f.end_s >= at_s}
        role = chance.choice([role for role in roles if role not in stopped])
        for_s = chance.uniform(*STOP_S)
        wanted = chance.random() < stops
        if wanted and len(stopped) < MOST_STOPPED and at_s + for_s <= seconds:
            action = Action.REPLACE if chance.random() < REPLACED else Action.STOP
            faults.append(Fault(at_s, action, role, for_s))
        elif not wanted or stops < 1:
            faults.append(Fault(at_s, Action.KILL, role))
        at_s += chance.uniform(*GAP_S)
    return faults


def _of_broker(chance: random.Random, seconds: float) -> list[Fault]:
    """One in each of equal parts of the time, away from their ends."""
    count = max(1, round(seconds / BROKER_EVERY_S))
    part_s = seconds / count
    return [
        Fault((part + chance.uniform(0.3, 0.7)) * part_s, Action.BROKER, "broker")
        for part in range(count)
    ]
