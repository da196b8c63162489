"""Records and groups as plain values for JSON: numbers of tokens instead of all of them. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.records import AssembledGroup, Record, RolloutRow, Trace
from schemas.vectors import LOGPROB_DTYPE, TOKEN_DTYPE, logprobs, tokens

FIRST_VALUES = 8
FIRST_BYTES = 256
DUMP_COLUMNS = 16
SHORT_BYTES = 32  # shown whole, in hex
ITEM_BYTES = TOKEN_DTYPE.itemsize  # of a log-probability too

assert LOGPROB_DTYPE.itemsize == ITEM_BYTES


def record_view(record: Record) -> dict[str, Any]:
    """Its class as `record`, and every field; vectors as {count, first}, other bytes in hex."""
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    return {"record": type(record).__name__} | {k: _shown(k, v) for k, v in fields.items()}


def group_view(group: AssembledGroup) -> dict[str, Any]:
    """A header and its rows, without tokens."""
    teachers = [
        {
            "teacher": each.teacher,
            "row_index": each.row_index,
            "trace_id": each.trace_id,
            "tokens": len(each.logprobs) // ITEM_BYTES,
        }
        for each in group.teacher_logprobs
    ]
    return {
        "attempt": group.attempt,
        "target_step": group.target_step,
        "purpose": group.purpose.value,
        "execution_id": group.execution_id,
        "generation_version": group.generation_version,
        "accepted_at_ms": group.accepted_at_ms,
        "teacher_logprobs": teachers,
        "rows": [row_view(row) for row in group.rows],
    }


def row_view(row: RolloutRow) -> dict[str, Any]:
    return {
        "row_index": row.row_index,
        "rollout_id": row.rollout_id,
        "agent": row.agent,
        "shard": row.shard,
        "replica": row.replica,
        "reward": row.reward,
        "reward_components": dict(row.reward_components),
        "masked": row.masked,
        "truncated": row.truncated,
        "failure_class": row.failure_class,
        "turn_count": row.turn_count,
        "generation_version": row.generation_version,
        "produced_at_ms": row.produced_at_ms,
        "tokens": sum(_length(trace.token_ids) for trace in row.traces),
        "sampled_tokens": sum(_sampled(trace) for trace in row.traces),
        "traces": [_trace_view(trace) for trace in row.traces],
    }


def hex_dump(value: bytes, limit: int = FIRST_BYTES) -> str:
    """The first `limit` bytes: offset, hex and printable ASCII, 16 a line."""
    lines = []
    for start in range(0, min(len(value), limit), DUMP_COLUMNS):
        part = value[start : min(start + DUMP_COLUMNS, limit)]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{start:08x}  {part.hex(' '):<{3 * DUMP_COLUMNS - 1}}  {text}")
    return "\n".join(lines)


def _trace_view(trace: Trace) -> dict[str, Any]:
    ends = [v for span in trace.sampled_spans for v in (span.version_start, span.version_end)]
    return {
        "trace_id": trace.trace_id,
        "model_calls": len(trace.model_call_ids),
        "tokens": _length(trace.token_ids),
        "sampled_tokens": _sampled(trace),
        "version_min": min(ends, default=None),
        "version_max": max(ends, default=None),
    }


def _sampled(trace: Trace) -> int:
    return sum(span.end - span.start for span in trace.sampled_spans)


def _length(vector: bytes) -> int:
    return len(vector) // ITEM_BYTES


def _shown(name: str, value: Any) -> Any:
    match value:
        case bytes():
            return _bytes_shown(name, value)
        case Mapping():
            return {key: _shown(key, item) for key, item in value.items()}
        case list():
            return [_shown(name, item) for item in value]
        case _:
            return value


def _bytes_shown(name: str, value: bytes) -> Any:
    if name == "token_ids":
        return {"count": _length(value), "first": tokens(_beginning(value)).tolist()}
    if name in ("generation_logprobs", "logprobs"):
        return {"count": _length(value), "first": logprobs(_beginning(value)).tolist()}
    if len(value) <= SHORT_BYTES:
        return value.hex()
    return {"bytes": len(value), "first": value[:SHORT_BYTES].hex()}


def _beginning(vector: bytes) -> bytes:
    """Of whole items: a record that decodes may still have a vector of a broken length."""
    return vector[: min(FIRST_VALUES, _length(vector)) * ITEM_BYTES]
