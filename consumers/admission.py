"""Which records of `rows` belong to the run at all: decoded, dispatched by it, in their place.

What is turned away here goes to `dlq` at once and never holds the commit.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

from consumers.settlement import MAX_AHEAD
from schemas.codec import decode
from schemas.errors import RecordUnreadable, RowRejected
from schemas.identity import ordinal_of, partition_of, stamp
from schemas.records import (
    AttemptFailed,
    CancelRequested,
    ExecutionStarted,
    Manifest,
    OfAttempt,
    RolloutRow,
)

ADMITTED = (RolloutRow, ExecutionStarted, AttemptFailed, CancelRequested)


class Incoming(NamedTuple):
    """One record of `rows` as it came. `value` is None for a tombstone."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Admission:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        # A row's siblings carry the same stamp: one hash a cohort, not one a row.
        self._stamp_of = lru_cache(maxsize=4096)(self._computed_stamp)

    def admit(self, incoming: Incoming) -> OfAttempt:
        """The decoded record. Raises RecordUnreadable or RowRejected, both with a reason."""
        if incoming.value is None:
            raise RecordUnreadable("no_value", "the record has no value, and `rows` has no deletes")
        record = decode(incoming.value)
        if not isinstance(record, ADMITTED):
            raise RecordUnreadable(
                "unexpected_record", f"`rows` does not carry {type(record).__name__}"
            )
        self._check_origin(record, incoming.partition)
        return record

    def check_reach(self, record: OfAttempt, watermark: int) -> None:
        """Raises RowRejected for a task too far above `watermark`: it could not be settled."""
        ahead = ordinal_of(record.task_index, self._manifest.num_partitions) - watermark
        if ahead > MAX_AHEAD:
            raise RowRejected(
                "too_far_ahead",
                f"task {record.task_index} is {ahead} ordinals above its partition's watermark, "
                f"limit {MAX_AHEAD}",
            )

    def _check_origin(self, record: OfAttempt, partition: int) -> None:
        manifest = self._manifest
        where = f"task {record.task_index} attempt {record.attempt}"
        if record.run_id != manifest.run_id:
            raise RowRejected(
                "wrong_run", f"{where} is of run {record.run_id!r}, this is {manifest.run_id!r}"
            )
        home = partition_of(record.task_index, manifest.num_partitions)
        if partition != home:
            raise RowRejected(
                "wrong_partition",
                f"{where} came on partition {partition}, its partition is {home}: the producer "
                "must pass task_index % partitions explicitly",
            )
        expected = self._stamp_of(
            record.task_index, record.attempt, record.target_step, record.group_size
        )
        if record.stamp != expected:
            raise RowRejected(
                "wrong_stamp",
                f"{where} of target {record.target_step} with G = {record.group_size} was not "
                f"dispatched: its stamp is {record.stamp.hex()}",
            )

    def _computed_stamp(
        self, task_index: int, attempt: int, target_step: int, group_size: int
    ) -> bytes | None:
        """None where the numbers do not fit a stamp: Avro's ints are wider than ours."""
        try:
            return stamp(
                self._manifest.stamp_key,
                self._manifest.run_id,
                task_index=task_index,
                attempt=attempt,
                target_step=target_step,
                group_size=group_size,
            )
        except struct.error:
            return None
