"""Everything that arrived for one task, and what was done with it and why. Pure.

An event names the offset in `rows` of the one record that caused it, a dead letter that of its
original. So a row below `seen`, the highest position ever committed, that nothing names was placed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from infra.inspection.letters import Letter
from infra.inspection.stored import Place, Stored, decoded
from infra.inspection.tasks import Standing, TaskLine
from schemas.records import (
    AttemptFailed,
    EventKind,
    FailedBy,
    GroupEvent,
    OfAttempt,
    Record,
    RolloutRow,
)


class Fate(StrEnum):
    STARTED = "started"
    PLACED = "placed"
    DUPLICATE = "duplicate"
    LATE = "late"
    DEAD_LETTER = "dead_letter"
    FAILED_ATTEMPT = "failed_attempt"
    CANCELLED = "cancelled"
    IGNORED = "ignored"
    UNREAD = "unread"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    FAILED = "failed"
    ABANDONED = "abandoned"
    SUPERSEDED = "superseded"
    """Another attempt was accepted first"""
    OPEN = "open"
    DISPATCHED = "dispatched"
    """Nothing has arrived yet"""


_FATES = {
    EventKind.STARTED: Fate.STARTED,
    EventKind.DUPLICATE: Fate.DUPLICATE,
    EventKind.LATE: Fate.LATE,
    EventKind.ATTEMPT_FAILED: Fate.FAILED_ATTEMPT,
    EventKind.ABANDONED: Fate.CANCELLED,
}


class Told(NamedTuple):
    """How far the topics speak of one partition of `rows`.

    `seen`: what was read and committed ends here. `from_offset`: events about records below it
    are deleted.
    """

    partition: int
    seen: int
    from_offset: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One record of `rows`. What is None is unknown: the record is deleted, or does not decode.

    A deleted one has the time of the event or the dead letter that tells of it.
    """

    place: Place
    at_ms: int
    record: str | None
    attempt: int | None
    row: int | None
    execution_id: str | None
    size_bytes: int | None
    fate: Fate
    why: str
    failed_attempt: bool
    letter: Letter | None


@dataclass(frozen=True)
class Attempt:
    number: int
    execution_id: str | None
    outcome: Outcome
    reason: str
    message: str
    ended_at_ms: int | None
    rows_placed: int
    arrivals: list[Arrival]


@dataclass(frozen=True)
class History:
    """`nameless`: of no known attempt, though their key names the task."""

    line: TaskLine
    attempts: list[Attempt]
    nameless: list[Arrival]


def history_of(
    line: TaskLine,
    records: Iterable[Stored],
    events: Sequence[GroupEvent],
    letters: Iterable[Letter],
    told: Told,
) -> History:
    """All are about this task: `records` and `events` of its partition, `letters` of any."""
    arrivals = _Arrivals(events, letters, told, line.standing).of(records)
    numbers = {a.attempt for a in arrivals if a.attempt is not None}
    numbers |= {event.attempt for event in events}
    if line.attempt >= 0:
        numbers.add(line.attempt)
    return History(
        line,
        [
            _attempt(number, line, [a for a in arrivals if a.attempt == number], events)
            for number in sorted(numbers)
        ],
        [a for a in arrivals if a.attempt is None],
    )


class _Arrivals:
    def __init__(
        self,
        events: Sequence[GroupEvent],
        letters: Iterable[Letter],
        told: Told,
        standing: Standing,
    ) -> None:
        self._events: dict[Place, list[GroupEvent]] = {}
        for event in events:
            if event.rows_offset >= 0:
                place = Place(told.partition, event.rows_offset)
                self._events.setdefault(place, []).append(event)
        self._failures = {e.attempt: e for e in events if e.kind is EventKind.ATTEMPT_FAILED}
        self._letters = {each.origin: each for each in letters if each.origin is not None}
        self._told = told
        self._has_ended = standing.is_accepted or standing is Standing.ABANDONED

    def of(self, records: Iterable[Stored]) -> list[Arrival]:
        """By place: what is stored, and what only events or letters still tell of."""
        found = {stored.place: self._of_record(stored) for stored in records}
        for place, letter in self._letters.items():
            found.setdefault(place, self._of_letter(place, letter))
        for place, events in self._events.items():
            found.setdefault(place, self._of_event(place, events[0]))
        return [found[place] for place in sorted(found)]

    def _of_record(self, stored: Stored) -> Arrival:
        record = decoded(stored.value)
        fate, why = self._fate(stored.place, record)
        return Arrival(
            place=stored.place,
            at_ms=stored.at_ms,
            record=None if record is None else type(record).__name__,
            attempt=record.attempt if isinstance(record, OfAttempt) else None,
            row=record.row_index if isinstance(record, RolloutRow) else None,
            execution_id=getattr(record, "execution_id", None),
            size_bytes=stored.size_bytes,
            fate=fate,
            why=why,
            failed_attempt=self._failed_its_attempt(stored.place),
            letter=self._letters.get(stored.place),
        )

    def _of_letter(self, place: Place, letter: Letter) -> Arrival:
        return Arrival(
            place=place,
            at_ms=letter.at_ms,
            record=letter.record,
            attempt=letter.attempt,
            row=letter.row,
            execution_id=None,
            size_bytes=letter.size_bytes,
            fate=Fate.DEAD_LETTER,
            why=_why_dead(letter),
            failed_attempt=self._failed_its_attempt(place),
            letter=letter,
        )

    def _of_event(self, place: Place, event: GroupEvent) -> Arrival:
        return Arrival(
            place=place,
            at_ms=event.at_ms,
            record=None,
            attempt=event.attempt,
            row=event.row_index if event.row_index >= 0 else None,
            execution_id=event.execution_id,
            size_bytes=None,
            fate=_FATES[event.kind],
            why=_why(event),
            failed_attempt=self._failed_its_attempt(place),
            letter=None,
        )

    def _fate(self, place: Place, record: Record | None) -> tuple[Fate, str]:
        if letter := self._letters.get(place):
            return Fate.DEAD_LETTER, _why_dead(letter)
        if events := self._events.get(place):
            return _FATES[events[0].kind], _why(events[0])
        return self._untold_fate(place, record)

    def _untold_fate(self, place: Place, record: Record | None) -> tuple[Fate, str]:
        if place.offset >= self._told.seen:
            return Fate.UNREAD, f"the assembler has committed up to offset {self._told.seen}"
        if place.offset < self._told.from_offset:
            return Fate.UNKNOWN, "the events of that time are deleted"
        if isinstance(record, RolloutRow):
            return Fate.PLACED, ""
        if isinstance(record, OfAttempt):
            return Fate.IGNORED, self._why_ignored(place, record)
        return Fate.UNKNOWN, "it does not decode, and its dead letter is deleted"

    def _why_ignored(self, place: Place, record: OfAttempt) -> str:
        """The assembler answers no start and no request that changes nothing."""
        failure = self._failures.get(record.attempt)
        if failure is not None and failure.rows_offset < place.offset:
            return "the attempt had failed"
        if isinstance(record, AttemptFailed) and record.by is FailedBy.DISPATCHER:
            return "the rows of the attempt were complete, or the task was settled"
        return "the task was settled" if self._has_ended else "nothing was left to do"

    def _failed_its_attempt(self, place: Place) -> bool:
        events = self._events.get(place, [])
        return any(event.kind is EventKind.ATTEMPT_FAILED for event in events)


def _attempt(
    number: int, line: TaskLine, arrivals: list[Arrival], events: Sequence[GroupEvent]
) -> Attempt:
    mine = [event for event in events if event.attempt == number]
    failure = next((e for e in mine if e.kind is EventKind.ATTEMPT_FAILED), None)
    end = next((e for e in events if e.kind in (EventKind.ACCEPTED, EventKind.ABANDONED)), None)
    outcome = _outcome(number, line, failure, is_empty=not (arrivals or mine))
    by = failure if outcome is Outcome.FAILED else end
    executions = [*(e.execution_id for e in mine), *(a.execution_id for a in arrivals)]
    return Attempt(
        number=number,
        execution_id=next(filter(None, executions), None),
        outcome=outcome,
        reason=by.reason if by else "",
        message=by.message if by else "",
        ended_at_ms=by.at_ms if by else None,
        rows_placed=len({a.row for a in arrivals if a.fate is Fate.PLACED}),
        arrivals=arrivals,
    )


def _outcome(number: int, line: TaskLine, failure: GroupEvent | None, *, is_empty: bool) -> Outcome:
    if failure is not None:
        return Outcome.FAILED
    if line.standing.is_accepted:
        return Outcome.ACCEPTED if line.attempt == number else Outcome.SUPERSEDED
    if line.standing is Standing.ABANDONED:
        return Outcome.ABANDONED
    return Outcome.DISPATCHED if is_empty else Outcome.OPEN


def _why(event: GroupEvent) -> str:
    return ": ".join(part for part in (event.reason, event.message) if part)


def _why_dead(letter: Letter) -> str:
    return ": ".join(part for part in (letter.reason, letter.message) if part)
