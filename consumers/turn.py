"""One record on its way through the assembler, or one round of offers, and what it caused."""

from dataclasses import dataclass, field
from typing import NamedTuple

from consumers.decisions import Decision, EmitEvent
from consumers.written import record_event
from schemas.records import EventKind, OfAttempt


class Now(NamedTuple):
    """`wall_ms` is written into records, `monotonic_s` measures waits."""

    wall_ms: int
    monotonic_s: float


@dataclass
class Counts:
    """Since the process began. rows = placed + late + duplicate + rejected, always."""

    rows: int = 0
    rows_placed: int = 0
    rows_late: int = 0
    rows_duplicate: int = 0
    rows_rejected: int = 0
    dead_letters: int = 0
    groups_accepted: int = 0
    groups_abandoned: int = 0
    attempts_failed: int = 0


@dataclass
class Turn:
    """`was_committed`: the record was read and committed once before; `offset` -1: no record."""

    now: Now
    decisions: list[Decision] = field(default_factory=list)
    was_committed: bool = False
    offset: int = -1

    def event_once(
        self, partition: int, record: OfAttempt, kind: EventKind, message: str = ""
    ) -> None:
        """What the record alone caused: not told again below `seen`."""
        if not self.was_committed:
            event = record_event(record, kind, self.now.wall_ms, self.offset, message=message)
            self.decisions.append(EmitEvent(partition, event))
