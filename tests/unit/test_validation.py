"""Each way in which a row can be wrong raises its own reason, with task, row and field."""

import msgspec
import numpy as np
import pytest

from schemas.errors import RowRejected
from schemas.records import RolloutRow, SampledSpan, Trace
from schemas.validation import check_row
from schemas.vectors import logprob_bytes, logprobs, token_bytes, tokens


def _span(call="c", start=2, end=4, versions=(3, 3)):
    return SampledSpan(
        model_call_id=call, start=start, end=end, version_start=versions[0], version_end=versions[1]
    )


def _trace(ids=(5, 6, 7, 8), values=(0, 0, -0.5, -0.25), spans=None, calls=("c",), name="t"):
    return Trace(
        trace_id=name,
        model_call_ids=list(calls),
        token_ids=token_bytes(list(ids)),
        generation_logprobs=logprob_bytes(list(values)),
        sampled_spans=[_span()] if spans is None else spans,
    )


def _row(**changes):
    row = RolloutRow(
        run_id="run",
        task_index=11,
        attempt=1,
        group_size=4,
        target_step=0,
        stamp=b"\0" * 8,
        row_index=3,
        execution_id="e",
        traces=[_trace()],
        rollout_id="11-3-a1",
        rowidx=3,
        agent="sums",
        shard="s",
        replica=0,
        reward=1.5,
        version_start=2,
        produced_at_ms=0,
    )
    return msgspec.structs.replace(row, **changes)


def test_a_right_row_passes_and_knows_its_version():
    check_row(_row())
    check_row(_row(reward_components={"a": 1.0, "b": 0.5}))
    check_row(_row(masked=True, traces=[]))
    assert _row().generation_version == 3
    assert _row(traces=[]).generation_version == 2


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"row_index": 4}, "row_index", "outside 0..3"),
        ({"row_index": -1}, "row_index", "outside 0..3"),
        ({"agent": ""}, "agent", "empty"),
        ({"reward": float("nan")}, "reward", "reward is nan"),
        ({"reward": float("inf")}, "reward", "reward is inf"),
        ({"reward_components": {"a": float("nan")}}, "reward_components", "component a is nan"),
        ({"reward_components": {"a": 1.0}}, "reward_components", "sum to 1.0, reward is 1.5"),
        ({"traces": []}, "traces", "not masked"),
        ({"traces": [_trace(), _trace()]}, "trace_id", "twice"),
        ({"traces": [_trace(values=(0, 0, np.nan, 0))]}, "generation_logprobs", "token 2 is nan"),
        ({"traces": [_trace(values=(0, 0, 0, -np.inf))]}, "generation_logprobs", "token 3 is -inf"),
        ({"traces": [_trace(values=(0, 0, -0.5))]}, "generation_logprobs", "3 .* for 4 token_ids"),
        ({"traces": [_trace(values=(0, -1, -0.5, 0))]}, "generation_logprobs", "outside every"),
        ({"traces": [_trace(ids=(5, -6, 7, 8))]}, "token_ids", "negative"),
        ({"traces": [_trace(spans=[])]}, "sampled_spans", "no sampled_spans"),
        ({"traces": [_trace(spans=[_span(start=0)])]}, "sampled_spans", "does not lie in"),
        ({"traces": [_trace(spans=[_span(end=5)])]}, "sampled_spans", "does not lie in"),
        ({"traces": [_trace(spans=[_span(start=3, end=3)])]}, "sampled_spans", "does not lie in"),
        ({"traces": [_trace(spans=[_span("x")])]}, "sampled_spans", "not in model_call_ids"),
        ({"traces": [_trace(spans=[_span(versions=(4, 3))])]}, "sampled_spans", "from version 4"),
        ({"traces": [_trace(calls=("c", "c"))]}, "model_call_ids", "listed twice"),
        ({"traces": [_trace(calls=("c", "d"))]}, "model_call_ids", r"no span .* \['d'\]"),
        ({"traces": [_trace(), _trace(name="u")]}, "sampled_spans", "owns two spans"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes, reason, text):
    with pytest.raises(RowRejected, match=text) as caught:
        check_row(_row(**changes))
    assert caught.value.reason == reason
    assert f"task 11 attempt 1 row {changes.get('row_index', 3)}" in str(caught.value)


def test_overlapping_spans_are_rejected():
    spans = [_span("c", 1, 3), _span("d", 2, 4)]
    with pytest.raises(RowRejected, match=r"3\.\.4"):
        check_row(_row(traces=[_trace(spans=spans, calls=("c", "d"))]))


def test_half_a_token_is_rejected():
    broken = msgspec.structs.replace(_trace(), token_ids=b"\0" * 15)
    with pytest.raises(RowRejected, match="4-byte"):
        check_row(_row(traces=[broken]))


def test_vectors_are_views_and_keep_every_bit():
    values = np.array([0.1, -1e-30, np.pi], dtype=np.float32)
    payload = logprob_bytes(values)
    assert logprobs(payload).tobytes() == values.tobytes()
    assert not logprobs(payload).flags.owndata
    assert tokens(token_bytes([1, 2**31 - 1])).tolist() == [1, 2**31 - 1]
