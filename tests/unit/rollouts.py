"""Rollout rows for the trainer's tests."""

import numpy as np

from schemas.records import RolloutRow, SampledSpan, Trace
from schemas.vectors import logprob_bytes, token_bytes
from trainer.traces import BatchSettings, TrainingBatch, build_batch


def make_trace(trace_id: str, token_ids: list[int], *, start: int, logprob: float = -1.0) -> Trace:
    """Sampled from `start` to its end by one model call."""
    values = np.zeros(len(token_ids), dtype=np.float32)
    values[start:] = logprob
    span = SampledSpan(
        model_call_id=f"{trace_id}:call",
        start=start,
        end=len(token_ids),
        version_start=0,
        version_end=0,
    )
    return Trace(
        trace_id=trace_id,
        model_call_ids=[span.model_call_id],
        token_ids=token_bytes(token_ids),
        generation_logprobs=logprob_bytes(values),
        sampled_spans=[span],
    )


def make_row(
    task: int,
    row: int,
    *,
    token_ids: list[int] | None = None,
    start: int = 2,
    reward: float = 0.0,
    logprob: float = -1.0,
) -> RolloutRow:
    """One rollout with one trace."""
    ids = token_ids if token_ids is not None else [1, 2, 3, 4]
    return RolloutRow(
        run_id="run",
        task_index=task,
        attempt=0,
        group_size=4,
        target_step=0,
        stamp=bytes(8),
        row_index=row,
        execution_id="execution",
        traces=[make_trace(f"{task}-{row}:trace", ids, start=start, logprob=logprob)],
        rollout_id=f"{task}-{row}",
        rowidx=row,
        agent="agent",
        shard="gym",
        replica=0,
        reward=reward,
        version_start=0,
        produced_at_ms=0,
    )


def random_groups(groups: int, size: int, *, vocab: int, seed: int) -> list[list[RolloutRow]]:
    rng = np.random.default_rng(seed)
    return [
        [
            make_row(
                task,
                row,
                token_ids=[int(t) for t in rng.integers(0, vocab, int(rng.integers(5, 24)))],
                start=3,
                reward=float(rng.integers(0, 2)),
                logprob=float(-rng.uniform(1, 5)),
            )
            for row in range(size)
        ]
        for task in range(groups)
    ]


def random_batch(
    *, groups: int = 4, size: int = 4, vocab: int = 67, seed: int = 0, row_multiple: int = 8
) -> TrainingBatch:
    settings = BatchSettings(
        max_total_sequence_length=64, pad_token_id=0, row_multiple=row_multiple
    )
    return build_batch(random_groups(groups, size, vocab=vocab, seed=seed), settings)
