"""What is done to whom and when: a list of faults from a seed. Pure.

Every fault is drawn before the run begins, each family from a stream of its own, so the same
seed, length, mode and roles give the same list, with or without the faults of the disk.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

SESSION_S = 5.0  # what the run's consumers are given; a stop is longer
STOP_S = (6.0, 13.0)  # from beyond the session to beyond the transactions and a shard's silence
NETWORK_S = (1.0, 20.0)
JUMP_S = (60.0, 6 * 3600.0)  # of a clock, forwards or backwards
FULL_S = (2.0, 6.0)  # the disk stays full after the broker died of it
BROKER_EVERY_S = 45.0
DISK_EVERY_S = 90.0
MOST_HELD = 2  # roles that are stopped or without network at a time: with more nothing would move
FOR_EVERYONE = 0.15  # the share of the network's faults that every role has at once
EVERYONE, BROKER = "everyone", "broker"


class Action(StrEnum):
    KILL = "kill"
    STOP = "stop"
    REPLACE = "replace"  # stopped, and another process of the same role starts meanwhile
    CUT = "cut"  # its connections to the broker are reset, new ones refused
    FREEZE = "freeze"  # its connections stay, no byte gets through
    CLOCK = "clock"  # its wall clock jumps, and stays there until the next jump
    BROKER = "broker"  # the broker is killed, and started again
    DISK = "disk"  # the broker's disk is full; it dies of that, and is started again


NETWORK = (Action.CUT, Action.FREEZE)
LASTING = (Action.STOP, Action.REPLACE, *NETWORK)


@dataclass(frozen=True)
class Fault:
    """`at_s` counts from the schedule's begin; what lasts ends `for_s` later.

    `shift_s`: what the role's clock is ahead of the true time, from then on.
    """

    at_s: float
    action: Action
    role: str
    for_s: float = 0.0
    shift_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s


@dataclass(frozen=True)
class Mode:
    """`of_roles`: their faults with their shares; a broker's or disk's are one in so many seconds.

    None: no such fault.
    """

    of_roles: Mapping[Action, float]
    broker_every_s: float | None = None
    disk_every_s: float | None = None


_STOPS = {Action.STOP: 0.6, Action.REPLACE: 0.4}
MODES = {
    "mixed": Mode(
        {
            Action.KILL: 0.5,
            Action.STOP: 0.12,
            Action.REPLACE: 0.08,
            Action.CUT: 0.1,
            Action.FREEZE: 0.1,
            Action.CLOCK: 0.1,
        },
        BROKER_EVERY_S,
        DISK_EVERY_S,
    ),
    "kill": Mode({Action.KILL: 1.0}),
    "stop": Mode(_STOPS),
    "broker": Mode({}, broker_every_s=BROKER_EVERY_S),
    "network": Mode({Action.CUT: 0.5, Action.FREEZE: 0.5}),
    "disk": Mode({}, disk_every_s=BROKER_EVERY_S),
    "clock": Mode({Action.CLOCK: 1.0}),
    "quiet": Mode({}),
}


@dataclass(frozen=True)
class Plan:
    """What a schedule is drawn from. `gap_s`: between two faults of roles, on average.

    `broker_restarts` None: as many as the mode has.
    """

    seed: int
    seconds: float
    mode: str
    roles: Sequence[str]
    gap_s: float = 3.0
    broker_restarts: int | None = None
    disk: bool = True

    def stream(self, family: str) -> random.Random:
        return random.Random(f"{self.seed} {self.seconds:g} {self.mode} {self.gap_s:g} {family}")


def make_schedule(plan: Plan) -> list[Fault]:
    """By time. All that lasts ends within `seconds`; a role that is held is left alone."""
    faults = [*_of_roles(plan), *_of_broker(plan)]
    return sorted(faults, key=lambda fault: fault.at_s)


def _of_roles(plan: Plan) -> list[Fault]:
    chance, shares = plan.stream("roles"), MODES[plan.mode].of_roles
    faults: list[Fault] = []
    at_s = _gap(chance, plan)
    while shares and at_s < plan.seconds:
        held = _held(faults, at_s, plan.roles)
        drawn = _drawn(chance, shares, at_s, plan.seconds)
        if drawn.for_s and (len(held) >= MOST_HELD or drawn.end_s > plan.seconds):
            drawn = Fault(at_s, Action.KILL, "")
        for_all = drawn.action in NETWORK and not held and chance.random() < FOR_EVERYONE
        free = [EVERYONE] if for_all else [role for role in plan.roles if role not in held]
        if free and drawn.action in shares:
            faults.append(replace(drawn, role=chance.choice(free)))
        at_s += _gap(chance, plan)
    return faults


def _gap(chance: random.Random, plan: Plan) -> float:
    return chance.uniform(2 / 3, 4 / 3) * plan.gap_s


def _held(faults: Sequence[Fault], at_s: float, roles: Sequence[str]) -> set[str]:
    held = {fault.role for fault in faults if fault.for_s and fault.end_s >= at_s}
    return set(roles) if EVERYONE in held else held


def _drawn(
    chance: random.Random, shares: Mapping[Action, float], at_s: float, seconds: float
) -> Fault:
    """Without its role. A network's fault is as short as the time that is left."""
    (action,) = chance.choices(list(shares), list(shares.values()))
    stop_s, shift_s = chance.uniform(*STOP_S), chance.choice((-1, 1)) * chance.uniform(*JUMP_S)
    lowest, highest = NETWORK_S
    network_s = chance.uniform(lowest, max(lowest, min(highest, seconds - at_s)))
    if action in NETWORK:
        return Fault(at_s, action, "", network_s)
    if action in LASTING:
        return Fault(at_s, action, "", stop_s)
    return Fault(at_s, action, "", shift_s=shift_s if action is Action.CLOCK else 0.0)


def _of_broker(plan: Plan) -> Iterator[Fault]:
    """One in each of equal parts of the time, away from their ends."""
    chance, mode = plan.stream("broker"), MODES[plan.mode]
    restarts = plan.broker_restarts
    if restarts is None:
        restarts = _count(plan.seconds, mode.broker_every_s)
    kinds = [Action.BROKER] * restarts + [Action.DISK] * _count(plan.seconds, mode.disk_every_s)
    chance.shuffle(kinds)
    for part, kind in enumerate(kinds):
        part_s = plan.seconds / len(kinds)
        at_s, full_s = (part + chance.uniform(0.3, 0.7)) * part_s, chance.uniform(*FULL_S)
        if kind is Action.BROKER:
            yield Fault(at_s, kind, BROKER)
        elif plan.disk:
            yield Fault(at_s, kind, BROKER, min(full_s, plan.seconds - at_s))


def _count(seconds: float, every_s: float | None) -> int:
    return 0 if every_s is None else max(1, round(seconds / every_s))
