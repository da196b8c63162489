"""Small valid records for tests, all of one run, each field replaceable by name.

`make_row(manifest, 7, 2)` is row 2 of task 7, stamped as the dispatcher would have done it.
"""

import struct
from typing import Any

from schemas.codec import encode
from schemas.identity import rollout_id, stamp
from schemas.records import (
    AttemptFailed,
    CancelRequested,
    ExecutionStarted,
    FailedBy,
    Manifest,
    Purpose,
    RolloutRow,
    SampledSpan,
    Trace,
)
from schemas.vectors import logprob_bytes, token_bytes

STAMP_KEY = b"k" * 32
PROMPT_TOKENS = 2


def make_manifest(run_id: str = "test-run", **changes: Any) -> Manifest:
    """2 partitions, N = 2, G = 4, age 1, unless `changes` says otherwise."""
    fields: dict[str, Any] = {
        "run_id": run_id,
        "num_partitions": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "lead": 1,
        "max_trajectory_age_steps": 1,
        "dataset_hash": "0" * 64,
        "first_step": 0,
        "first_task_index": 0,
        "shards": {"gym": 1},
        "stamp_key": STAMP_KEY,
        "max_row_bytes": 16 << 20,
        "max_group_bytes": 128 << 20,
        "created_at_ms": 1,
    }
    return Manifest(**fields | changes)


def make_identity(
    manifest: Manifest,
    task_index: int,
    attempt: int = 0,
    *,
    target_step: int = 0,
    group_size: int | None = None,
    purpose: Purpose = Purpose.TRAIN,
) -> dict[str, Any]:
    """The fields that every record about an attempt begins with, rightly stamped."""
    size = manifest.num_generations_per_prompt if group_size is None else group_size
    return {
        "run_id": manifest.run_id,
        "task_index": task_index,
        "attempt": attempt,
        "group_size": size,
        "target_step": target_step,
        "stamp": make_stamp(manifest, task_index, attempt, target_step, size),
        "purpose": purpose,
    }


def make_stamp(
    manifest: Manifest, task_index: int, attempt: int, target_step: int, group_size: int
) -> bytes:
    return stamp(
        manifest.stamp_key,
        manifest.run_id,
        task_index=task_index,
        attempt=attempt,
        target_step=target_step,
        group_size=group_size,
    )


def execution_of(task_index: int, attempt: int = 0) -> str:
    """The execution id that the builders below use for an attempt."""
    return f"execution-{task_index}-{attempt}"


def make_trace(trace_id: str = "t", *, tokens: int = 8, version: int = 0, seed: int = 0) -> Trace:
    """[tokens] ids of which all but the first two are sampled, by one model call."""
    sampled = tokens - PROMPT_TOKENS
    values = [0.0] * PROMPT_TOKENS + [-(1 + (seed + i) % 7) / 8 for i in range(sampled)]
    call = f"{trace_id}:call"
    return Trace(
        trace_id=trace_id,
        model_call_ids=[call],
        token_ids=token_bytes([(seed * 31 + i) % 50_000 for i in range(tokens)]),
        generation_logprobs=logprob_bytes(values),
        sampled_spans=[
            SampledSpan(
                model_call_id=call,
                start=PROMPT_TOKENS,
                end=tokens,
                version_start=version,
                version_end=version,
            )
        ],
    )


def make_row(
    manifest: Manifest,
    task_index: int,
    row_index: int,
    attempt: int = 0,
    *,
    target_step: int = 0,
    group_size: int | None = None,
    purpose: Purpose = Purpose.TRAIN,
    tokens: int = 8,
    version: int = 0,
    **changes: Any,
) -> RolloutRow:
    """A valid row of `tokens` tokens sampled under policy `version`."""
    identity = make_identity(
        manifest,
        task_index,
        attempt,
        target_step=target_step,
        group_size=group_size,
        purpose=purpose,
    )
    name = rollout_id(task_index, row_index, attempt)
    fields: dict[str, Any] = identity | {
        "row_index": row_index,
        "execution_id": execution_of(task_index, attempt),
        "traces": [
            make_trace(name, tokens=tokens, version=version, seed=task_index * 64 + row_index)
        ],
        "rollout_id": name,
        "rowidx": task_index * identity["group_size"] + row_index,
        "agent": "sums",
        "shard": "gym",
        "replica": 0,
        "reward": float(row_index % 2),
        "version_start": version,
        "produced_at_ms": 1_000 + row_index,
    }
    return RolloutRow(**fields | changes)


def make_rows(manifest: Manifest, task_index: int, attempt: int = 0, **rest: Any) -> list[bytes]:
    """[G] encoded rows of one cohort, in row order; `rest` as for make_row."""
    size = rest.get("group_size") or manifest.num_generations_per_prompt
    return [encode(make_row(manifest, task_index, i, attempt, **rest)) for i in range(size)]


def make_started(
    manifest: Manifest, task_index: int, attempt: int = 0, *, target_step: int = 0, **changes: Any
) -> ExecutionStarted:
    fields: dict[str, Any] = make_identity(
        manifest, task_index, attempt, target_step=target_step
    ) | {
        "execution_id": execution_of(task_index, attempt),
        "shard": "gym",
        "replica": 0,
        "version_start": 0,
        "started_at_ms": 900,
    }
    return ExecutionStarted(**fields | changes)


def make_failed(
    manifest: Manifest,
    task_index: int,
    attempt: int = 0,
    *,
    by: FailedBy = FailedBy.SHARD,
    target_step: int = 0,
    **changes: Any,
) -> AttemptFailed:
    fields: dict[str, Any] = make_identity(
        manifest, task_index, attempt, target_step=target_step
    ) | {
        "by": by,
        "reason": "gym_error" if by is FailedBy.SHARD else "shard_lost",
        "failure_class": "infra",
        "message": "the gym raised",
    }
    return AttemptFailed(**fields | changes)


def make_cancel(
    manifest: Manifest, task_index: int, attempt: int = 0, *, target_step: int = 0, **changes: Any
) -> CancelRequested:
    fields: dict[str, Any] = make_identity(
        manifest, task_index, attempt, target_step=target_step
    ) | {"reason": "attempts_exhausted"}
    return CancelRequested(**fields | changes)


def with_nan_logprob(row: RolloutRow) -> bytes:
    """The row's payload with a NaN in its last log-probability, as a foreign producer sends it."""
    payload = encode(row)
    values = row.traces[-1].generation_logprobs
    broken = values[:-4] + struct.pack("<f", float("nan"))
    return payload.replace(values, broken)
