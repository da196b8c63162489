"""Dead letters and the marks that say what was done about them, folded from `dlq`. Pure.

A mark is a record of the same partition of `dlq` with the header `groupstream.resolution`: it
names the letter's offset and, where the letter was replayed, the new record's place in `rows`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from infra.inspection.stored import Place, Stored, decoded
from schemas import topics as keys
from schemas.records import OfAttempt, RolloutRow

UNLABELLED = "unlabelled"  # another program wrote to `dlq`


class Resolution(StrEnum):
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Mark:
    """`replayed_to`: the copy in `rows`."""

    letter_offset: int
    resolution: Resolution
    at_ms: int
    replayed_to: Place | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """One rejected record. `record` and what follows it are None where it does not decode.

    `origin` is None, and `reason` UNLABELLED, where the headers do not say.
    """

    place: Place
    reason: str
    message: str
    origin_topic: str
    origin: Place | None
    record: str | None
    task: int | None
    attempt: int | None
    row: int | None
    size_bytes: int
    at_ms: int
    mark: Mark | None = None

    def marked(self, mark: Mark) -> Self:
        return replace(self, mark=mark)


def is_mark(headers: Iterable[tuple[str, bytes | None]] | None) -> bool:
    """Whether a record of `dlq` with these headers is a mark and no letter."""
    return any(name == keys.DLQ_RESOLUTION for name, _ in headers or ())


def mark_headers(mark: Mark) -> list[tuple[str, bytes]]:
    """What mark_of() reads; `at_ms` is the record's own."""
    headers = {
        keys.DLQ_RESOLUTION: mark.resolution.value,
        keys.DLQ_RESOLVED_OFFSET: str(mark.letter_offset),
    }
    if mark.replayed_to is not None:
        headers[keys.DLQ_REPLAY_PARTITION] = str(mark.replayed_to.partition)
        headers[keys.DLQ_REPLAY_OFFSET] = str(mark.replayed_to.offset)
    return [(name, value.encode()) for name, value in headers.items()]


def mark_of(stored: Stored) -> Mark:
    """Raises KeyError, ValueError where the headers are not those of mark_headers()."""
    headers = stored.headers
    return Mark(
        int(headers[keys.DLQ_RESOLVED_OFFSET]),
        Resolution(headers[keys.DLQ_RESOLUTION].decode()),
        stored.at_ms,
        _place(headers, keys.DLQ_REPLAY_PARTITION, keys.DLQ_REPLAY_OFFSET),
    )


def letter_of(stored: Stored) -> Letter:
    record = decoded(stored.value)
    known = record if isinstance(record, OfAttempt) else None
    return Letter(
        place=stored.place,
        reason=_text(stored.headers, keys.DLQ_REASON) or UNLABELLED,
        message=_text(stored.headers, keys.DLQ_MESSAGE),
        origin_topic=_text(stored.headers, keys.DLQ_TOPIC),
        origin=_place(stored.headers, keys.DLQ_PARTITION, keys.DLQ_OFFSET),
        record=None if record is None else type(record).__name__,
        task=known.task_index if known else None,
        attempt=known.attempt if known else None,
        row=record.row_index if isinstance(record, RolloutRow) else None,
        size_bytes=stored.size_bytes,
        at_ms=stored.at_ms,
    )


class LetterBook:
    """The letters of one partition; of two marks of a letter the one entered later counts."""

    def __init__(self) -> None:
        self._letters: dict[int, Letter] = {}
        self._marks: dict[int, Mark] = {}

    def enter(self, stored: Stored) -> None:
        if is_mark(stored.headers.items()):
            mark = mark_of(stored)
            self._marks[mark.letter_offset] = mark
        else:
            self._letters[stored.place.offset] = letter_of(stored)

    def letters(self) -> list[Letter]:
        """By offset, each with its latest mark."""
        marks = self._marks
        return [
            letter.marked(marks[offset]) if offset in marks else letter
            for offset, letter in sorted(self._letters.items())
        ]


@dataclass(frozen=True)
class Selection:
    """Which letters a command is about; a value that is None does not restrict."""

    place: Place | None = None
    reason: str | None = None
    task: int | None = None
    resolved_too: bool = False

    def takes(self, letter: Letter) -> bool:
        return (
            (self.place is None or letter.place == self.place)
            and (self.reason is None or letter.reason == self.reason)
            and (self.task is None or letter.task == self.task)
            and (self.resolved_too or letter.mark is None)
        )


def by_reason(letters: Iterable[Letter]) -> dict[str, int]:
    """How many for each reason, the most frequent first."""
    return dict(Counter(letter.reason for letter in letters).most_common())


def _text(headers: Mapping[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")


def _place(headers: Mapping[str, bytes], partition: str, offset: str) -> Place | None:
    try:
        return Place(int(headers[partition]), int(headers[offset]))
    except (KeyError, ValueError):
        return None
