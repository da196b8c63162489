"""Records in the shape of NeMo Gym's results, and real ones where they lie beside the project:
in the directory GROUPSTREAM_REAL_ROLLOUTS, or ../shared/data seen from the repository."""

import json

import pytest

from producers.nemo_gym import rollout_result
from producers.row import RowOptions, rollout_row
from schemas.codec import decode, encode
from schemas.errors import RowRejected
from schemas.validation import check_row
from schemas.vectors import logprobs, tokens
from tests.nemo_rollouts import REAL_FILES
from tests.prompts import make_group
from tests.rows import make_manifest, make_started

MANIFEST = make_manifest()


def item(prompt, sampled, values=None, kind="message", **more):
    return {
        "type": kind,
        "role": "assistant",
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled) if values is None else values,
    } | more


def record(*output, **more):
    return {"response": {"output": list(output), "usage": {"input_tokens": 12}}, "reward": 1} | more


def convert(given, **versions):
    return rollout_result(given, "7-2", **({"version_start": 3, "version_end": 4} | versions))


def as_row(given):
    """The row of a converted record, checked and once over the wire."""
    group, started = make_group(MANIFEST, 7), make_started(MANIFEST, 7)
    row = rollout_row(
        group, started, 2, "7-2", convert(given), timing=None, produced_at_ms=1,
        options=RowOptions(),
    )  # fmt: skip
    check_row(row)
    return decode(encode(row))


def rejected(given):
    with pytest.raises(RowRejected, match="rollout 7-2") as caught:
        convert(given)
    return caught.value


def test_one_call_is_one_span_with_the_ids_as_they_were_sampled():
    row = as_row(record({"type": "reasoning"}, item([5, 6], [7, 8, 9], [-0.25, -1.5, 0.0])))
    (trace,) = row.traces
    assert tokens(trace.token_ids).tolist() == [5, 6, 7, 8, 9]
    assert logprobs(trace.generation_logprobs).tolist() == [0.0, 0.0, -0.25, -1.5, 0.0]
    (span,) = trace.sampled_spans
    assert (span.start, span.end, span.version_start, span.version_end) == (2, 5, 3, 4)
    assert (row.turn_count, row.reward, row.version_start) == (1, 1.0, 3)


def test_what_a_later_prompt_adds_is_context():
    row = as_row(
        record(
            item([1, 2], [3], kind="function_call"),
            {"type": "function_call_output", "output": "x"},
            item([1, 2, 3, 10, 11], [12, 13]),
        )
    )
    (trace,) = row.traces
    assert tokens(trace.token_ids).tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert logprobs(trace.generation_logprobs).tolist() == [0, 0, -0.5, 0, 0, -0.5, -0.5]
    assert [(span.start, span.end) for span in trace.sampled_spans] == [(2, 3), (5, 7)]
    assert trace.model_call_ids == ["7-2:0", "7-2:1"]
    assert row.turn_count == 2


@pytest.mark.parametrize("prompt", [[1, 2, 9, 10], [1, 2], [4]])
def test_a_rewritten_history_is_refused(prompt):
    error = rejected(record(item([1, 2], [3]), item(prompt, [12])))
    assert error.reason == "not_contiguous"
    assert "model call 2 of 2" in str(error)
    assert f"prompt of {len(prompt)} tokens" in str(error)


def test_no_token_ids_is_a_clear_answer():
    error = rejected(record({"type": "message"}, {"type": "function_call"}, item([1], [])))
    assert error.reason == "no_generation_data"
    assert "Prompt: 1 tokens" in str(error)
    assert "['message', 'function_call', 'message']" in str(error)
    assert "12 input tokens" in str(rejected(record({"type": "message"})))
    assert "['message']" in str(rejected(record({"type": "message"})))
    assert "output items: []" in str(rejected(record()))


@pytest.mark.parametrize(
    "flag",
    [
        {"mask_sample": True},
        {"instance_config": {"mask_sample": True}},
        {"_ng_failure_class": "timeout"},
    ],
)
def test_a_failed_or_flagged_result_without_tokens_is_a_masked_row(flag):
    row = as_row(record({"type": "message"}, **flag))
    assert row.masked
    assert row.traces == []
    assert row.failure_class == flag.get("_ng_failure_class")


def test_a_failed_result_with_tokens_is_masked_too():
    assert as_row(record(item([1], [2]), _ng_failure_class="timeout")).masked
    assert as_row(record(item([1], [2]), mask_sample=True)).masked
    assert not as_row(record(item([1], [2]), mask_sample=False)).masked


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        (record(item([1], [2, 3], [-0.5, None])), "generation_logprobs", "[1] is None"),
        (record(item([1], [2], [float("nan")])), "generation_logprobs", "[0] is nan"),
        (record(item([1], [2], [float("-inf")])), "generation_logprobs", "[0] is -inf"),
        (record(item([1], [2], ["-0.5"])), "generation_logprobs", "[0] is '-0.5'"),
        (record(item([1], [2], [-0.5, -0.5])), "generation_logprobs", "2 generation_log_probs"),
        (record(item([1], [2], None) | {"generation_log_probs": None}), "token_ids", "but no"),
        (record(item(None, [2])), "token_ids", "but no ['prompt_token_ids']"),
        (record(item([1], [-2])), "token_ids", "generation_token_ids[0] is -2"),
        (record(item([1.0], [2])), "token_ids", "prompt_token_ids[0] is 1.0"),
        (record(item([1], [2**31])), "token_ids", "no token id"),
        (record(item([1], [2]), reward=None), "reward", "reward is None"),
        (record(item([1], [2]), reward=True), "reward", "reward is True"),
        (record(item([1], [2]), reward=float("inf")), "reward", "reward is inf"),
        (record(item([1], [2]), reward_components={"a": None}), "reward_components", "component a"),
        (record(item([1], [2]), reward_components=[1]), "reward_components", "[1]"),
        ({"reward": 1.0}, "malformed_result", "['reward']"),
        ({"reward": 1.0, "response": {"output": ["text"]}}, "malformed_result", "output"),
    ],
)
def test_what_is_not_usable_is_named(given, reason, words):
    error = rejected(given)
    assert error.reason == reason
    assert words in str(error)


def test_components_are_kept_and_must_sum_to_the_reward():
    components = {"correct": 1.0, "format": 0.0}
    assert as_row(record(item([1], [2]), reward_components=components)).reward_components == (
        components
    )
    with pytest.raises(RowRejected, match=r"components sum to 3\.0"):
        as_row(record(item([1], [2]), reward_components={"a": 3}))


def test_the_token_budget_truncates():
    given = record(item([1], [2]))
    given["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    assert as_row(given).truncated
    given["response"]["incomplete_details"] = None
    assert not as_row(given).truncated


def check_real_records(path):
    for line in path.read_text().splitlines():
        given = json.loads(line)
        sampled = [
            (len(i["prompt_token_ids"]), i["generation_token_ids"], i["generation_log_probs"])
            for i in given["response"]["output"]
            if i.get("generation_token_ids")
        ]
        if not sampled:
            error = rejected(given)
            assert error.reason == "no_generation_data"
            assert f"{given['response']['usage']['input_tokens']} input tokens" in str(error)
            assert str([i["type"] for i in given["response"]["output"]]) in str(error)
            continue
        row = as_row(given)
        (trace,) = row.traces
        assert row.reward == given["reward"]
        assert [
            (
                span.start,
                tokens(trace.token_ids)[span.start : span.end].tolist(),
                logprobs(trace.generation_logprobs)[span.start : span.end].tolist(),
            )
            for span in trace.sampled_spans
        ] == [
            (start, ids, pytest.approx(values, rel=1e-6, abs=1e-7))
            for start, ids, values in sampled
        ]


if REAL_FILES:

    @pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
    def test_real_records_become_rows_or_a_clear_answer(path):
        check_real_records(path)
