"""What the monitor knows at one moment. Pure: offsets and heartbeats in, numbers out."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from consumers.settlement import SettledSet
from infra.screen.view import trouble_of
from schemas.control import ControlState
from schemas.errors import MetadataUnreadable
from schemas.identity import initial_watermark
from schemas.records import Heartbeat

GONE_S = 60.0  # an ended process is shown so long


@dataclass(frozen=True)
class PartitionFacts:
    """Of one partition of `rows`, as the broker reports it. `committed` None: no commit yet."""

    partition: int
    first: int
    end: int
    committed: int | None
    metadata: str
    dead_letters: int


@dataclass(frozen=True)
class PartitionLine:
    """Offsets of `rows`: everything below `committed` is settled, below `position` was read.

    `held` = position - committed: records that an open or held group keeps from being committed.
    `unread` = end - position. `settled_above`: tasks already settled above the lowest unsettled.
    """

    partition: int
    committed: int
    position: int
    end: int
    unread: int
    held: int
    settled_tasks: int
    settled_above: int
    dead_letters: int
    problem: str


@dataclass(frozen=True)
class RoleStatus:
    role: str
    instance: str
    pid: int
    host: str
    doing: str
    since_s: float
    silent_s: float
    ended: bool
    stalled: bool
    trouble: str
    counters: dict[str, float]


@dataclass(frozen=True)
class Snapshot:
    """Sums over tasks are the dispatcher's, from its ledger; `settled_tasks` the assemblers'."""

    run_id: str
    at_ms: int
    state: str
    step: int
    version: int
    checkpoint_step: int | None
    last_target: int | None
    settled_tasks: int
    groups_accepted: int
    open_groups: int
    held_groups: int
    dead_letters: int
    unread: int
    dispatched: int
    abandoned: int
    outstanding: int
    partitions: list[PartitionLine]
    roles: list[RoleStatus]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def partition_line(facts: PartitionFacts, num_partitions: int, first_task: int) -> PartitionLine:
    """Without a commit nothing was read yet."""
    committed = facts.first if facts.committed is None else facts.committed
    settled, seen, problem = SettledSet(), committed, ""
    if facts.committed is not None:
        try:
            settled, seen = SettledSet.decode(facts.metadata)
        except MetadataUnreadable as error:
            problem = f"commit metadata is unreadable: {error}"
    position = max(committed, seen)
    start = initial_watermark(facts.partition, num_partitions, first_task)
    above = sum(ordinal in settled for ordinal in range(settled.watermark, settled.end))
    return PartitionLine(
        partition=facts.partition,
        committed=committed,
        position=position,
        end=facts.end,
        unread=max(0, facts.end - position),
        held=position - committed,
        settled_tasks=max(0, settled.watermark - start) + above,
        settled_above=above,
        dead_letters=facts.dead_letters,
        problem=problem,
    )


def role_status(heartbeat: Heartbeat, now_ms: int) -> RoleStatus:
    trouble = trouble_of(heartbeat, now_ms)
    return RoleStatus(
        role=heartbeat.role,
        instance=heartbeat.instance,
        pid=heartbeat.pid,
        host=heartbeat.host,
        doing=heartbeat.doing,
        since_s=max(0, now_ms - heartbeat.doing_since_ms) / 1000,
        silent_s=max(0, now_ms - heartbeat.at_ms) / 1000,
        ended=heartbeat.doing.startswith("ended"),
        stalled=bool(trouble),
        trouble=trouble,
        counters=heartbeat.counters,
    )


def snapshot_of(
    control: ControlState,
    partitions: Sequence[PartitionFacts],
    heartbeats: Iterable[Heartbeat],
    now_ms: int,
) -> Snapshot:
    """`control` must have the manifest."""
    manifest = control.manifest
    assert manifest is not None
    everyone = [role_status(heartbeat, now_ms) for heartbeat in heartbeats]
    roles = [role for role in everyone if not (role.ended and role.silent_s > GONE_S)]
    working = [role for role in roles if not role.ended]
    lines = [
        partition_line(facts, manifest.num_partitions, manifest.first_task_index)
        for facts in partitions
    ]
    return Snapshot(
        run_id=manifest.run_id,
        at_ms=now_ms,
        state=_state(control),
        step=max(0, control.highest_version),
        version=control.policy.version if control.policy else -1,
        checkpoint_step=control.checkpoint.step if control.checkpoint else None,
        last_target=control.last_target,
        settled_tasks=sum(line.settled_tasks for line in lines),
        groups_accepted=_counted(everyone, "dispatcher", "accepted"),
        open_groups=_counted(working, "assembler", "groups_open"),
        held_groups=_counted(working, "assembler", "groups_held"),
        dead_letters=sum(line.dead_letters for line in lines),
        unread=sum(line.unread for line in lines),
        dispatched=_counted(everyone, "dispatcher", "dispatched"),
        abandoned=_counted(everyone, "dispatcher", "abandoned"),
        outstanding=_counted(everyone, "dispatcher", "outstanding"),
        partitions=lines,
        roles=roles,
    )


def _state(control: ControlState) -> str:
    if control.fatal is not None:
        return f"fatal, said the {control.fatal.role}: {control.fatal.message}"
    return "finished" if control.finished is not None else "running"


def _counted(roles: Sequence[RoleStatus], role: str, counter: str) -> int:
    """Sum over the processes of the role."""
    return int(sum(r.counters.get(counter, 0) for r in roles if r.role == role))
