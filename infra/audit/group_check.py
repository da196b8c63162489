"""What is wrong with one group, next to the rows that it was made of. Pure."""

import struct
from collections.abc import Mapping

from msgspec.structs import replace

from schemas.codec import encode_group
from schemas.identity import partition_of, stamp
from schemas.records import AssembledGroup, Manifest, OfAttempt, RolloutRow

RowKey = tuple[int, int, int]  # task_index, attempt, row_index
_SHARED = ("run_id", "task_index", "attempt", "group_size", "target_step", "stamp", "purpose")


def stamp_of(record: OfAttempt, manifest: Manifest) -> bytes:
    """The stamp that the dispatcher gave the record's attempt."""
    return stamp(
        manifest.stamp_key,
        manifest.run_id,
        task_index=record.task_index,
        attempt=record.attempt,
        target_step=record.target_step,
        group_size=record.group_size,
    )


def was_dispatched(record: OfAttempt, manifest: Manifest) -> bool:
    """Whether the record has that stamp; a hostile one may have numbers that fit no stamp."""
    try:
        return record.run_id == manifest.run_id and record.stamp == stamp_of(record, manifest)
    except struct.error:
        return False


def is_ordered(group: AssembledGroup) -> bool:
    """Whether its rows come in row_index order."""
    indices = [row.row_index for row in group.rows]
    return indices == sorted(indices)


def flaws_of(
    group: AssembledGroup,
    payload: bytes,
    row_payloads: Mapping[RowKey, bytes],
    partition: int,
    manifest: Manifest,
) -> list[str]:
    """One sentence each. `row_payloads` are those of `rows`, `payload` the group's own bytes."""
    name = f"group of task {group.task_index} attempt {group.attempt}"
    flaws = [f"{name}: {flaw}" for flaw in _identity_flaws(group, partition, manifest)]
    indices = [row.row_index for row in group.rows]
    if indices != list(range(group.group_size)):
        flaws.append(f"{name}: its rows are {indices}, not 0 to {group.group_size - 1} in order")
    for row in group.rows:
        flaws += [f"{name}: {flaw}" for flaw in _foreign(row, group)]
    keys = [(group.task_index, group.attempt, index) for index in indices]
    if missing := [key[2] for key in keys if key not in row_payloads]:
        flaws.append(f"{name}: its rows {missing} are not in `rows`")
    elif encode_group(replace(group, rows=[]), [row_payloads[key] for key in keys]) != payload:
        flaws.append(f"{name}: its bytes are not those of its rows")
    return flaws


def _identity_flaws(group: AssembledGroup, partition: int, manifest: Manifest) -> list[str]:
    flaws = []
    expected = partition_of(group.task_index, manifest.num_partitions)
    if partition != expected:
        flaws.append(f"it is in partition {partition}, not {expected}")
    if group.run_id != manifest.run_id:
        flaws.append(f"it is of run {group.run_id}")
    if group.stamp != stamp_of(group, manifest):
        flaws.append("nobody dispatched it: its stamp is wrong")
    return flaws


def _foreign(row: RolloutRow, group: AssembledGroup) -> list[str]:
    """Fields in which a row belongs to another group than the one that it is in."""
    names = [*_SHARED, "execution_id"]
    return [
        f"row {row.row_index} has {name} {getattr(row, name)!r}, the group {getattr(group, name)!r}"
        for name in names
        if getattr(row, name) != getattr(group, name)
    ]
