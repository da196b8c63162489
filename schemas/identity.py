"""Who a record belongs to: partitions and ordinals of tasks, rollout ids, stamps."""

import hashlib
import re
import struct

STAMP_BYTES = 8
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STAMPED = struct.Struct("<qiqi")


def partition_of(task_index: int, num_partitions: int) -> int:
    """Passed to the producer explicitly: clients in other languages hash keys differently."""
    return task_index % num_partitions


def ordinal_of(task_index: int, num_partitions: int) -> int:
    """Position of a task among the tasks of its partition."""
    return task_index // num_partitions


def task_of(ordinal: int, partition: int, num_partitions: int) -> int:
    return ordinal * num_partitions + partition


def initial_watermark(partition: int, num_partitions: int, first_task_index: int) -> int:
    """The first ordinal of `partition` in a run whose first task is `first_task_index`."""
    return max(0, -(-(first_task_index - partition) // num_partitions))


def key_of(task_index: int) -> bytes:
    return str(task_index).encode()


def stamp(
    key: bytes, run_id: str, *, task_index: int, attempt: int, target_step: int, group_size: int
) -> bytes:
    """8 bytes, BLAKE2b keyed by the manifest's nonce: a row without it was not dispatched."""
    digest = hashlib.blake2b(digest_size=STAMP_BYTES, key=key)
    digest.update(_STAMPED.pack(task_index, attempt, target_step, group_size))
    digest.update(run_id.encode())
    return digest.digest()


def rollout_id(task_index: int, row_index: int, attempt: int, supplied: str | None = None) -> str:
    """`{task}-{rollout}` or the supplied id, with `-a{attempt}` from the second attempt on.

    Raises ValueError where the supplied id is no path-safe name.
    """
    if supplied is not None and not _ROLLOUT_ID.fullmatch(supplied):
        raise ValueError(f"rollout id {supplied!r} does not match {_ROLLOUT_ID.pattern}")
    name = supplied if supplied is not None else f"{task_index}-{row_index}"
    return f"{name}-a{attempt}" if attempt > 0 else name
