"""What a row must fulfil before it may be trained: its shard checks, and the assembler again."""

import math

import numpy as np
from numpy.typing import NDArray

from schemas.errors import RowRejected
from schemas.records import RolloutRow, Trace
from schemas.vectors import logprobs, tokens


def check_row(row: RolloutRow) -> None:
    """Raises RowRejected, whose message names task, row, field and both values."""
    where = f"task {row.task_index} attempt {row.attempt} row {row.row_index}"
    if row.group_size < 1 or not 0 <= row.row_index < row.group_size:
        raise RowRejected("row_index", f"{where}: row_index is outside 0..{row.group_size - 1}")
    if not row.agent:
        raise RowRejected("agent", f"{where}: agent is empty")
    _check_reward(row, where)
    if not row.traces and not row.masked:
        raise RowRejected("traces", f"{where}: no traces, and the row is not masked")
    _check_traces(row.traces, where)


def _check_reward(row: RolloutRow, where: str) -> None:
    if not math.isfinite(row.reward):
        raise RowRejected("reward", f"{where}: reward is {row.reward}")
    for name, value in row.reward_components.items():
        if not math.isfinite(value):
            raise RowRejected("reward_components", f"{where}: component {name} is {value}")
    total = math.fsum(row.reward_components.values())
    if row.reward_components and not math.isclose(row.reward, total, rel_tol=1e-5, abs_tol=1e-6):
        raise RowRejected(
            "reward_components", f"{where}: components sum to {total}, reward is {row.reward}"
        )


def _check_traces(traces: list[Trace], where: str) -> None:
    trace_ids: set[str] = set()
    owned: set[str] = set()
    listed: set[str] = set()
    for trace in traces:
        here = f"{where} trace {trace.trace_id!r}"
        if not trace.trace_id or trace.trace_id in trace_ids:
            raise RowRejected("trace_id", f"{here}: trace_id is empty or used twice in the row")
        trace_ids.add(trace.trace_id)
        listed.update(trace.model_call_ids)
        _check_vectors(trace, here)
        for span in trace.sampled_spans:
            if span.model_call_id in owned:
                raise RowRejected(
                    "sampled_spans", f"{here}: call {span.model_call_id!r} owns two spans"
                )
            owned.add(span.model_call_id)
    if listed - owned:
        raise RowRejected(
            "model_call_ids", f"{where}: no span belongs to calls {sorted(listed - owned)}"
        )


def _check_vectors(trace: Trace, here: str) -> None:
    try:
        ids, values = tokens(trace.token_ids), logprobs(trace.generation_logprobs)
    except ValueError as error:
        raise RowRejected("token_ids", f"{here}: no whole number of 4-byte values") from error
    if len(ids) == 0 or len(ids) != len(values):
        raise RowRejected(
            "generation_logprobs",
            f"{here}: {len(values)} generation_logprobs for {len(ids)} token_ids",
        )
    if int(ids.min()) < 0:
        raise RowRejected("token_ids", f"{here}: token id {int(ids.min())} is negative")
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        raise RowRejected("generation_logprobs", f"{here}: logprob at token {at} is {values[at]}")
    _check_spans(trace, len(ids), here)
    _check_gaps(trace, values, here)


def _check_gaps(trace: Trace, values: NDArray[np.float32], here: str) -> None:
    """What was not sampled has no log-probability."""
    ends = [0, *(span.end for span in trace.sampled_spans)]
    starts = [*(span.start for span in trace.sampled_spans), len(values)]
    for gap_start, gap_end in zip(ends, starts, strict=True):
        gap = values[gap_start:gap_end]
        if gap.any():
            at = gap_start + int(np.flatnonzero(gap)[0])
            raise RowRejected(
                "generation_logprobs",
                f"{here}: logprob {values[at]} at token {at}, outside every span",
            )


def _check_spans(trace: Trace, length: int, here: str) -> None:
    """Ascending, inside the trace, each of a call that the trace lists."""
    if len(set(trace.model_call_ids)) != len(trace.model_call_ids):
        raise RowRejected("model_call_ids", f"{here}: a model call is listed twice")
    if not trace.sampled_spans:
        raise RowRejected("sampled_spans", f"{here}: no sampled_spans")
    previous_end = 1
    for span in trace.sampled_spans:
        if not previous_end <= span.start < span.end <= length:
            raise RowRejected(
                "sampled_spans",
                f"{here}: span {span.start}..{span.end} of {span.model_call_id!r} does not lie in "
                f"{previous_end}..{length}, in ascending order",
            )
        if span.model_call_id not in trace.model_call_ids:
            raise RowRejected(
                "sampled_spans", f"{here}: call {span.model_call_id!r} is not in model_call_ids"
            )
        if not 0 <= span.version_start <= span.version_end:
            raise RowRejected(
                "sampled_spans",
                f"{here}: call {span.model_call_id!r} ran from version {span.version_start} to "
                f"{span.version_end}",
            )
        previous_end = span.end
