"""The dispatcher's memory: outstanding tasks and cumulative sums. Pure.

Every change is a record or a tombstone of the compacted `dispatch` topic, and the fold of that
topic is the state after a restart. Always: dispatched = accepted + abandoned + outstanding.
"""

from collections.abc import Iterable
from typing import Any, Self

from msgspec.structs import replace

from schemas.errors import GroupstreamError
from schemas.identity import key_of
from schemas.records import LedgerTask, LedgerTotals
from schemas.topics import LEDGER_TOTALS

TOTALS_KEY = LEDGER_TOTALS.encode()

LedgerRecord = LedgerTask | LedgerTotals


class LedgerBroken(GroupstreamError):
    """The `dispatch` topic does not add up; the message has the sums."""


class Ledger:
    """`tasks` are the outstanding ones by task_index; change them by the methods only."""

    def __init__(self, first_task_index: int, group_size: int) -> None:
        self.tasks: dict[int, LedgerTask] = {}
        self.totals = LedgerTotals(next_task_index=first_task_index)
        self.is_new = True
        self._group_size = group_size
        self._changed: dict[bytes, None] = {}

    @classmethod
    def folded(
        cls,
        records: Iterable[tuple[bytes, LedgerRecord | None]],
        first_task_index: int,
        group_size: int,
    ) -> Self:
        """The ledger that these records and tombstones, in order, leave. Raises LedgerBroken."""
        ledger = cls(first_task_index, group_size)
        for key, record in records:
            match record:
                case LedgerTotals():
                    ledger.totals = record
                    ledger.is_new = False
                case LedgerTask():
                    ledger.tasks[record.task_index] = record
                case None:
                    ledger.tasks.pop(int(key), None)
        ledger.require_sums()
        return ledger

    @property
    def abandoned(self) -> int:
        return sum(self.totals.abandoned.values())

    def require_sums(self) -> None:
        """Raises LedgerBroken unless every dispatched task ended once or is outstanding."""
        totals = self.totals
        if totals.dispatched != totals.accepted + self.abandoned + len(self.tasks):
            raise LedgerBroken(
                f"the ledger does not add up: dispatched {totals.dispatched}, accepted "
                f"{totals.accepted}, abandoned {totals.abandoned}, outstanding {len(self.tasks)}; "
                "was another program writing to the dispatch topic?"
            )

    def add(self, task: LedgerTask) -> None:
        """A new task; its index must be the next one."""
        if task.task_index != self.totals.next_task_index:
            raise ValueError(
                f"task {task.task_index} is not the next, {self.totals.next_task_index}"
            )
        self.put(task)
        self.note(
            next_task_index=task.task_index + 1,
            dispatched=self.totals.dispatched + 1,
        )

    def put(self, task: LedgerTask) -> None:
        self.tasks[task.task_index] = task
        self._changed[key_of(task.task_index)] = None

    def note(self, **values: Any) -> None:
        """New values of fields of the totals."""
        self.totals = replace(self.totals, **values)
        self._changed[TOTALS_KEY] = None

    def accept(self, task_index: int) -> None:
        task = self._end(task_index)
        target = str(task.target_step)
        filled = self._filled(task.target_step) | 1 << self.slot_of(task)
        self.note(
            accepted=self.totals.accepted + 1,
            failures_in_a_row=0,
            filled_slots=self.totals.filled_slots | {target: _bytes_of(filled)},
        )

    def abandon(self, task_index: int, reason: str) -> None:
        self._end(task_index)
        abandoned = self.totals.abandoned
        self.note(
            abandoned=abandoned | {reason: abandoned.get(reason, 0) + 1},
            failures_in_a_row=self.totals.failures_in_a_row + 1,
        )

    def forget_targets_below(self, version: int) -> None:
        """Trained targets need no slots any more."""
        filled, short = self.totals.filled_slots, self.totals.short_targets
        if any(int(target) < version for target in (*filled, *short)):
            self.note(
                filled_slots={t: bits for t, bits in filled.items() if int(t) >= version},
                short_targets={t: size for t, size in short.items() if int(t) >= version},
            )

    def covered(self) -> dict[int, int]:
        """Bitmap of covered slots (accepted or outstanding) by target."""
        bits = {int(target): self._filled(int(target)) for target in self.totals.filled_slots}
        for task in self.tasks.values():
            bits[task.target_step] = bits.get(task.target_step, 0) | 1 << self.slot_of(task)
        return bits

    def slot_of(self, task: LedgerTask) -> int:
        return task.rowidx_start // self._group_size

    def lowest_ordinals(self, num_partitions: int) -> dict[int, int]:
        """Ordinal of the lowest outstanding task, by partition of `rows`."""
        lowest: dict[int, int] = {}
        for task_index in self.tasks:
            ordinal, partition = divmod(task_index, num_partitions)
            lowest[partition] = min(ordinal, lowest.get(partition, ordinal))
        return lowest

    def take_changes(self) -> list[tuple[bytes, LedgerRecord | None]]:
        """What must be written since the last call: records, and None for an ended task."""
        changes: list[tuple[bytes, LedgerRecord | None]] = [
            (key, self.totals if key == TOTALS_KEY else self.tasks.get(int(key)))
            for key in self._changed
        ]
        self._changed.clear()
        return changes

    def _end(self, task_index: int) -> LedgerTask:
        self._changed[key_of(task_index)] = None
        return self.tasks.pop(task_index)

    def _filled(self, target: int) -> int:
        return int.from_bytes(self.totals.filled_slots.get(str(target), b""), "little")


def _bytes_of(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
