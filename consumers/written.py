"""The records that decisions are written as: events, and dead letters that fit their topic."""

from typing import Any

from consumers.admission import Incoming
from consumers.cohort import Cohort
from consumers.decisions import DeadLetter
from schemas import topics as keys
from schemas.limits import HEADER_ROOM
from schemas.records import EventKind, GroupEvent, OfAttempt

MAX_MESSAGE_CHARS = 2000  # a hostile record's fields may be as long as the record
MAX_KEY_BYTES = 1024  # of a record that has to be cut
_FROM_RECORD = ("execution_id", "shard", "replica", "row_index")


def identity_of(record: OfAttempt) -> dict[str, Any]:
    """The fields that all records about an attempt begin with."""
    return {name: getattr(record, name) for name in OfAttempt.__struct_fields__}


def record_event(
    record: OfAttempt,
    kind: EventKind,
    at_ms: int,
    rows_offset: int,
    *,
    reason: str = "",
    message: str = "",
) -> GroupEvent:
    """What the record at `rows_offset` of `rows` caused."""
    named = {name: getattr(record, name) for name in _FROM_RECORD if hasattr(record, name)}
    return GroupEvent(
        **identity_of(record),
        **named,
        kind=kind,
        rows_offset=rows_offset,
        reason=reason[:MAX_MESSAGE_CHARS],
        message=message[:MAX_MESSAGE_CHARS],
        at_ms=at_ms,
    )


def cohort_event(
    cohort: Cohort,
    kind: EventKind,
    at_ms: int,
    *,
    rows_offset: int = -1,
    reason: str = "",
    failure_class: str = "",
    message: str = "",
) -> GroupEvent:
    """What became of a whole cohort; `rows_offset` where a single record decided it."""
    return GroupEvent(
        **identity_of(cohort.identity),
        kind=kind,
        execution_id=cohort.execution_id,
        shard=cohort.shard,
        replica=cohort.replica,
        rows_offset=rows_offset,
        generation_version=cohort.generation_version,
        reason=reason[:MAX_MESSAGE_CHARS],
        failure_class=failure_class[:MAX_MESSAGE_CHARS],
        message=message[:MAX_MESSAGE_CHARS],
        at_ms=at_ms,
    )


def dead_letter(incoming: Incoming, reason: str, message: str, max_row_bytes: int) -> DeadLetter:
    """The record verbatim, unless it came compressed and `dlq` could not take it unpacked."""
    key, value = incoming.key, incoming.value
    size = len(key or b"") + len(value or b"")
    longest = max_row_bytes + HEADER_ROOM
    if size > longest:
        message = f"cut from {size} bytes to the {longest} that `dlq` takes; {message}"
        key = (key or b"")[:MAX_KEY_BYTES]
        value = (value or b"")[: longest - MAX_KEY_BYTES]
    return DeadLetter(
        incoming.partition, incoming.offset, key, value, reason, message[:MAX_MESSAGE_CHARS]
    )


def headers_of(letter: DeadLetter, topic: str) -> list[tuple[str, bytes]]:
    return [
        (keys.DLQ_REASON, letter.reason.encode()),
        (keys.DLQ_MESSAGE, letter.message.encode(errors="replace")),
        (keys.DLQ_TOPIC, topic.encode()),
        (keys.DLQ_PARTITION, str(letter.partition).encode()),
        (keys.DLQ_OFFSET, str(letter.offset).encode()),
    ]
