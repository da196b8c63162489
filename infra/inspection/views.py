"""What the tools print with --json: every key is always there, null where it is unknown. Pure."""

from typing import Any

from infra.inspection.history import Arrival, Attempt, History
from infra.inspection.letters import Letter, by_reason
from infra.inspection.record_view import FIRST_BYTES, group_view, record_view
from infra.inspection.stored import Place, Stored, decoded
from infra.inspection.tasks import Sums, TaskLine
from schemas.records import AssembledGroup


def letter_view(letter: Letter) -> dict[str, Any]:
    mark, origin = letter.mark, letter.origin
    copy = None if mark is None else mark.replayed_to
    return {
        "partition": letter.place.partition,
        "offset": letter.place.offset,
        "reason": letter.reason,
        "origin_topic": letter.origin_topic,
        "origin_partition": None if origin is None else origin.partition,
        "origin_offset": None if origin is None else origin.offset,
        "record": letter.record,
        "task": letter.task,
        "attempt": letter.attempt,
        "row": letter.row,
        "size_bytes": letter.size_bytes,
        "at_ms": letter.at_ms,
        "resolution": None if mark is None else mark.resolution.value,
        "resolved_at_ms": None if mark is None else mark.at_ms,
        "replayed_partition": None if copy is None else copy.partition,
        "replayed_offset": None if copy is None else copy.offset,
    }


def opened_letter_view(letter: Letter, stored: Stored) -> dict[str, Any]:
    """letter_view() and what is inside; `hex` has the first bytes of what does not decode."""
    record = decoded(stored.value)
    value = stored.value or b""
    return letter_view(letter) | {
        "message": letter.message,
        "key": None if stored.key is None else stored.key.decode(errors="backslashreplace"),
        "headers": {
            name: text.decode(errors="backslashreplace") for name, text in stored.headers.items()
        },
        "decoded": None if record is None else record_view(record),
        "hex": value[:FIRST_BYTES].hex() if record is None else None,
    }


def reasons_view(letters: list[Letter]) -> dict[str, Any]:
    return {"letters": len(letters), "reasons": by_reason(letters)}


def line_view(line: TaskLine) -> dict[str, Any]:
    return {
        "task": line.task,
        "state": line.standing.value,
        "reason": line.reason,
        "target_step": line.target_step,
        "attempt": line.attempt,
        "rows": line.rows,
        "group_size": line.group_size,
        "purpose": line.purpose.value,
        "agent": line.agent,
        "shard": line.shard,
        "replica": line.replica,
        "at_ms": line.at_ms,
    }


def sums_view(sums: Sums) -> dict[str, Any]:
    return {
        "dispatched": sums.dispatched,
        "accepted": sums.accepted,
        "trained": sums.trained,
        "abandoned": sums.abandoned,
        "outstanding": sums.outstanding,
        "forgotten": sums.forgotten,
    }


def task_group_view(
    line: TaskLine, place: Place | None, size_bytes: int, group: AssembledGroup | None
) -> dict[str, Any]:
    """line_view(), and the group where `groups` still has it."""
    found = None
    if place is not None and group is not None:
        where = {"partition": place.partition, "offset": place.offset, "size_bytes": size_bytes}
        found = where | group_view(group)
    return line_view(line) | {"message": line.message, "group": found}


def history_view(history: History) -> dict[str, Any]:
    return line_view(history.line) | {
        "message": history.line.message,
        "attempts": [_attempt_view(attempt) for attempt in history.attempts],
        "nameless": [_arrival_view(arrival) for arrival in history.nameless],
    }


def _attempt_view(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "execution_id": attempt.execution_id,
        "outcome": attempt.outcome.value,
        "reason": attempt.reason,
        "message": attempt.message,
        "ended_at_ms": attempt.ended_at_ms,
        "rows_placed": attempt.rows_placed,
        "records": [_arrival_view(arrival) for arrival in attempt.arrivals],
    }


def _arrival_view(arrival: Arrival) -> dict[str, Any]:
    letter = arrival.letter
    mark = None if letter is None else letter.mark
    return {
        "partition": arrival.place.partition,
        "offset": arrival.place.offset,
        "at_ms": arrival.at_ms,
        "record": arrival.record,
        "row": arrival.row,
        "execution_id": arrival.execution_id,
        "size_bytes": arrival.size_bytes,
        "fate": arrival.fate.value,
        "why": arrival.why,
        "failed_attempt": arrival.failed_attempt,
        "letter_partition": None if letter is None else letter.place.partition,
        "letter_offset": None if letter is None else letter.place.offset,
        "resolution": None if mark is None else mark.resolution.value,
    }
