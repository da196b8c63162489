"""The rows of one attempt of one task, while they arrive.

Pure. A row's payload may be let go to save memory; its offset, size and digest stay, so that a
repeat is still recognised and the payload can be read again.
"""

import hashlib
from dataclasses import dataclass, field

from schemas.codec import PREFIX_BYTES
from schemas.errors import RowRejected
from schemas.records import ExecutionStarted, OfAttempt, RolloutRow, TeacherLogprobs

DIGEST_BYTES = 16


def digest_of(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


class PlacedRow:
    """A valid row at its index. `payload` is None while let go, and `digest` set from then on."""

    __slots__ = ("digest", "offset", "payload", "size")

    def __init__(self, offset: int, payload: bytes) -> None:
        self.offset = offset
        self.size = len(payload)
        self.payload: bytes | None = payload
        self.digest = b""

    def let_go(self) -> None:
        if self.payload is not None:
            self.digest = digest_of(self.payload)
            self.payload = None

    def equals(self, payload: bytes) -> bool:
        if self.payload is not None:
            return self.payload == payload
        return self.size == len(payload) and self.digest == digest_of(payload)


@dataclass(eq=False)
class Cohort:
    """Opened by the first record of its attempt, whatever that is; `identity` is that record's.

    `agent` and `execution_id` are None until a record names them. A failed cohort keeps no rows.
    """

    partition: int
    first_offset: int
    identity: OfAttempt
    agent: str | None = None
    execution_id: str | None = None
    shard: str = ""
    replica: int = -1
    started: bool = False
    failed: bool = False
    rows: dict[int, PlacedRow] = field(default_factory=dict)
    rows_bytes: int = 0  # of all rows, let go or not
    resident_bytes: int = 0  # of the payloads in memory
    generation_version: int = -1
    last_offset: int = -1  # of its latest row: of two complete cohorts the lower was first
    delay_s: float = 0.0
    offer_at_s: float = 0.0  # monotonic
    teacher_logprobs: list[TeacherLogprobs] | None = None  # None until the teacher answered

    @property
    def task_index(self) -> int:
        return self.identity.task_index

    @property
    def attempt(self) -> int:
        return self.identity.attempt

    @property
    def key(self) -> tuple[int, int]:
        """(task_index, attempt)."""
        return self.identity.cohort

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest is needed first. Of two attempts the later one: the other may be dead."""
        return self.identity.target_step, self.task_index, -self.attempt

    @property
    def is_complete(self) -> bool:
        return not self.failed and len(self.rows) == self.identity.group_size

    @property
    def is_resident(self) -> bool:
        """No payload was let go."""
        return self.resident_bytes == self.rows_bytes

    @property
    def encoded_rows_bytes(self) -> int:
        """What the rows take inside an AssembledGroup: a row's prefix is not repeated there."""
        return self.rows_bytes - PREFIX_BYTES * len(self.rows)

    def check_same(self, record: ExecutionStarted | RolloutRow) -> None:
        """Raises RowRejected where `record` is of another cohort than the records before it."""
        for name in ("group_size", "target_step", "purpose", "stamp"):
            self._check_equal(record, name, getattr(self.identity, name))
        if self.execution_id is not None:
            self._check_equal(record, "execution_id", self.execution_id)
        if self.agent is not None and isinstance(record, RolloutRow):
            self._check_equal(record, "agent", self.agent)

    def _check_equal(self, record: OfAttempt, name: str, expected: object) -> None:
        found = getattr(record, name)
        if found != expected:
            raise RowRejected(
                f"{name}_differs",
                f"task {self.task_index} attempt {self.attempt}: {name} is {found!r}, the "
                f"attempt's earlier records have {expected!r}",
            )

    def is_repeat(self, row: RolloutRow, payload: bytes) -> bool:
        """Raises RowRejected for another row at the same index."""
        placed = self.rows.get(row.row_index)
        if placed is None:
            return False
        if not placed.equals(payload):
            raise RowRejected(
                "conflicting_repeat",
                f"task {self.task_index} attempt {self.attempt} row {row.row_index}: differs from "
                f"the row at offset {placed.offset}",
            )
        return True

    def place(self, row: RolloutRow, offset: int, payload: bytes) -> None:
        version = row.generation_version
        if not self.rows or version < self.generation_version:
            self.generation_version = version
        self.rows[row.row_index] = PlacedRow(offset, payload)
        self.last_offset = offset
        self.rows_bytes += len(payload)
        self.resident_bytes += len(payload)
        self.agent, self.execution_id = row.agent, row.execution_id
        self.shard, self.replica = row.shard, row.replica

    def missing_at(self, partition: int, offset: int) -> PlacedRow | None:
        """The row of that record, where its payload was let go."""
        if partition != self.partition:
            return None
        found = (row for row in self.rows.values() if row.offset == offset)
        return next((row for row in found if row.payload is None), None)

    def let_go(self) -> None:
        """Every payload leaves the memory."""
        for row in self.rows.values():
            row.let_go()
        self.resident_bytes = 0

    def clear(self) -> None:
        """The rows are not wanted any more, now or later."""
        self.rows.clear()
        self.rows_bytes = self.resident_bytes = 0
        self.teacher_logprobs = None

    def payloads(self) -> list[bytes]:
        """[G] payloads in row_index order. Only of a complete, resident cohort."""
        found = [self.rows[index].payload for index in range(self.identity.group_size)]
        return [payload for payload in found if payload is not None]
