"""Everything that the assembler can decide: the closed list that `consumers/worker.py` carries out.

All decisions of one flush become visible together, in one transaction, or not at all.
"""

from typing import TypeAlias

from msgspec import Struct

from schemas.records import GroupEvent


class EmitGroup(Struct, frozen=True):
    """Write `value`, an encoded AssembledGroup, to `partition` of `groups`."""

    partition: int
    task_index: int
    value: bytes


class EmitEvent(Struct, frozen=True):
    """Write `event` to `partition` of `events`."""

    partition: int
    event: GroupEvent


class DeadLetter(Struct, frozen=True):
    """Write a record of `rows` to the same partition of `dlq`, with why and whence in headers."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    reason: str
    message: str


Decision: TypeAlias = EmitGroup | EmitEvent | DeadLetter


class CommitPoint(Struct, frozen=True):
    """What a flush commits for one partition of `rows`."""

    partition: int
    offset: int
    metadata: str
