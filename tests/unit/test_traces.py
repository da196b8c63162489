import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import SampledSpan, Trace
from schemas.vectors import logprob_bytes, token_bytes
from tests.unit.rollouts import make_row, make_trace
from trainer.traces import BatchSettings, build_batch


def settings(**more):
    values = {
        "max_total_sequence_length": 16,
        "pad_token_id": 9,
        "normalize_rewards": False,
        "gym_multi_trace": True,
    }
    return BatchSettings(**values | more)


def rollout(task, row, reward, lengths, **more):
    """A rollout with one trace a length, all sampled from position 1 on."""
    traces = [make_trace(f"t{n}", list(range(1, n + 1)), start=1) for n in lengths]
    return msgspec.structs.replace(make_row(task, row, reward=reward), traces=traces, **more)


def test_rows_hold_ids_masks_and_logprobs():
    groups = [[make_row(0, 0, token_ids=[5, 6, 7, 8], start=2, reward=1.0, logprob=-0.5)]]
    batch = build_batch(groups, settings(make_sequence_length_divisible_by=4, row_multiple=2))
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 9, 9, 9]]
    assert batch.input_ids.dtype == batch.input_lengths.dtype == torch.int64
    assert batch.input_lengths.tolist() == [4, 2]
    assert batch.token_mask.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.generation_logprobs.tolist() == [[0, 0, -0.5, -0.5], [0, 0, 0, 0]]
    assert batch.sample_mask.tolist() == [1, 0]
    assert batch.eligible_tokens == 2
    assert batch.task_indices == (0, -1)
    assert batch.rollout_ids == ("0-0", "")


def test_masked_rollouts_do_not_vote_and_groups_do_not_mix():
    groups = [
        [rollout(7, 0, 0.0, [3, 4]), rollout(7, 1, 100.0, [3], masked=True)],
        [rollout(8, 0, 1.0, [3]), rollout(8, 1, 0.0, [3])],
    ]
    batch = build_batch(groups, settings(row_multiple=4))
    assert batch.logical_index == (0, 0, 1, 2, 3, 0, 0, 0)
    assert batch.advantages[:5, 0].tolist() == [0, 0, 0, 1, -1]
    assert batch.sample_mask.tolist() == [1, 1, 0, 1, 1, 0, 0, 0]
    assert batch.metrics["gym/invalid_rollouts"] == 1
    assert batch.metrics["gym/logical_rollouts"] == batch.logical_rollouts == 4
    assert batch.metrics["gym/physical_rows"] == 5
    assert batch.metrics["gym/padding_rows"] == 3


def test_overlong_traces_and_empty_rollouts_become_inert_rows():
    empty = rollout(0, 1, 1.0, [], masked=True, rollout_id="masked-1")
    groups = [[rollout(0, 0, 0.0, [5, 2], rollout_id="a"), empty]]
    batch = build_batch(groups, settings(max_total_sequence_length=3, row_multiple=4))
    assert batch.sample_mask.tolist() == [0, 1, 0, 0]
    assert batch.rollout_ids == ("a", "a", "masked-1", "")
    assert batch.trace_ids == ("t5", "t2", "", "")
    assert batch.input_lengths.tolist() == [2, 2, 2, 2]
    assert batch.metrics["gym/overlong_traces"] == 1
    assert batch.metrics["gym/invalid_rollouts"] == 1


def test_length_equal_to_the_limit_is_eligible():
    batch = build_batch([[rollout(0, 0, 1.0, [4])]], settings(max_total_sequence_length=4))
    assert batch.sample_mask.tolist() == [1]


def test_trace_count_adds_no_votes():
    one = build_batch([[rollout(0, 0, 1.0, [3]), rollout(0, 1, 0.0, [3])]], settings())
    many = build_batch([[rollout(0, 0, 1.0, [3, 4, 5]), rollout(0, 1, 0.0, [3])]], settings())
    assert one.advantages[:, 0].tolist() == [1, -1]
    assert many.advantages[:, 0].tolist() == [1, 1, 1, -1]


def test_without_the_flag_a_rollout_with_several_traces_is_masked_and_counted():
    groups = [[rollout(0, 0, 9.0, [3, 4]), rollout(0, 1, 1.0, [3]), rollout(0, 2, 0.0, [3])]]
    batch = build_batch(groups, settings(gym_multi_trace=False))
    assert batch.rows == 3
    assert batch.sample_mask.tolist() == [0, 1, 1]
    assert batch.advantages[:, 0].tolist() == [0, 1, -1]
    assert batch.metrics["gym/multi_trace_rollouts"] == 1


def test_overlong_filtering_masks_truncated_rollouts():
    groups = [[rollout(0, 0, 9.0, [3], truncated=True), rollout(0, 1, 1.0, [3])]]
    assert build_batch(groups, settings()).sample_mask.tolist() == [1, 1]
    filtered = build_batch(groups, settings(overlong_filtering=True))
    assert filtered.sample_mask.tolist() == [0, 1]


def test_equal_prompts_of_two_tasks_stay_two_groups():
    groups = [
        [make_row(0, 0, reward=1.0), make_row(0, 1, reward=0.0)],
        [make_row(1, 0, reward=5.0), make_row(1, 1, reward=5.0)],
    ]
    assert build_batch(groups, settings()).advantages[:, 0].tolist() == [1, -1, 0, 0]


def test_advantages_are_clipped_after_normalising():
    groups = [[make_row(0, 0, reward=10.0), make_row(0, 1, reward=0.0)]]
    batch = build_batch(groups, settings(advantage_clip_low=-1.0, advantage_clip_high=2.0))
    assert batch.advantages[:, 0].tolist() == [2, -1]


def test_all_ineligible_is_a_batch_without_tokens():
    batch = build_batch([[rollout(0, 0, 1.0, [], masked=True)]], settings())
    assert batch.eligible_tokens == 0
    assert batch.input_ids.tolist() == [[9, 9]]


def broken_trace(**fields):
    row = make_row(3, 1)
    trace = msgspec.structs.replace(row.traces[0], **fields)
    return [[msgspec.structs.replace(row, traces=[trace])]]


def spans(*pairs):
    return [
        SampledSpan(model_call_id=f"c{i}", start=a, end=b, version_start=0, version_end=0)
        for i, (a, b) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[make_row(3, 1, reward=float("nan"))]], "task 3 row 1: reward nan"),
        ([[make_row(3, 1, reward=float("inf"))]], "task 3 row 1: reward inf"),
        ([[make_row(3, 1), make_row(3, 1)]], "rollout_id '3-1' is also that of task 3 row 1"),
        ([[make_row(0, 0)], [make_row(1, 0), make_row(1, 1)]], r"one size, got \[1, 2\]"),
        ([], "a step without groups"),
        (broken_trace(generation_logprobs=logprob_bytes([0.0])), "1 generation_logprobs for 4"),
        (broken_trace(sampled_spans=spans((0, 2))), r"span \[0, 2\)"),
        (broken_trace(sampled_spans=spans((2, 5))), r"span \[2, 5\)"),
        (broken_trace(sampled_spans=spans((1, 3), (2, 4))), "overlaps"),
        (
            broken_trace(generation_logprobs=logprob_bytes([0, 0, np.nan, 0])),
            "generation_logprob is not finite",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(groups, message):
    with pytest.raises(ValueError, match=message):
        build_batch(groups, settings())


@given(st.data())
def test_every_sampled_token_of_an_eligible_trace_is_owned_once(data):
    limit = 8
    groups, owned = [], 0
    for task in range(data.draw(st.integers(1, 3))):
        group = []
        for row in range(2):
            masked = data.draw(st.booleans())
            traces = []
            for number in range(data.draw(st.integers(0, 3))):
                length = data.draw(st.integers(2, 10))
                start = data.draw(st.integers(1, length - 1))
                ids = data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
                traces.append(make_trace(f"{task}.{row}.{number}", ids, start=start))
                owned += (length - start) * (not masked and length <= limit)
            base = make_row(task, row, reward=float(data.draw(st.integers(0, 1))))
            group.append(msgspec.structs.replace(base, traces=traces, masked=masked))
        groups.append(group)
    multiple = data.draw(st.integers(1, 4))
    batch = build_batch(groups, settings(max_total_sequence_length=limit, row_multiple=multiple))
    assert batch.eligible_tokens == owned
    assert batch.rows % multiple == 0
    assert batch.input_ids.shape[1] <= limit
    trace_ids = [t.trace_id for group in groups for row in group for t in row.traces]
    assert [t for t in batch.trace_ids if t] == trace_ids


def test_ids_survive_bit_for_bit():
    values = np.array([0, 0, -0.1, -1e-7], dtype=np.float32)
    trace = Trace(
        trace_id="x",
        model_call_ids=["c0"],
        token_ids=token_bytes([2**31 - 1, 0, 7, 1]),
        generation_logprobs=logprob_bytes(values),
        sampled_spans=spans((2, 4)),
    )
    row = msgspec.structs.replace(make_row(0, 0), traces=[trace])
    batch = build_batch([[row]], settings())
    assert batch.input_ids[0].tolist() == [2**31 - 1, 0, 7, 1]
    assert batch.generation_logprobs[0].numpy().tobytes() == values.tobytes()
