import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import LossConfig
from trainer.loss import (
    MAXIMA,
    MINIMA,
    SUMMED_METRICS,
    LossInputs,
    clipped_policy_gradient_loss,
)


def inputs(
    curr, prev=None, gen=None, ref=None, *, advantages=1.0, token_mask=None, sample_mask=None
):
    """One value a scored token; position 0, which no loss may read, holds NaN."""

    def wide(values, default):
        values = default if values is None else values
        tensor = torch.tensor(values, dtype=torch.float64)
        return torch.cat(
            [torch.full((tensor.shape[0], 1), torch.nan, dtype=tensor.dtype), tensor], 1
        )

    current = torch.tensor(curr, dtype=torch.float64)
    rows = current.shape[0]
    if isinstance(advantages, float):
        advantages = [[advantages] * current.shape[1]] * rows
    mask = torch.ones_like(current) if token_mask is None else torch.tensor(token_mask).double()
    return LossInputs(
        curr_logprobs=wide(curr, curr).requires_grad_(),
        prev_logprobs=wide(prev, curr),
        generation_logprobs=wide(gen, curr if prev is None else prev),
        reference_logprobs=None if ref is None else wide(ref, ref),
        advantages=wide(advantages, advantages),
        token_mask=torch.cat([torch.ones(rows, 1, dtype=torch.float64), mask], 1),
        sample_mask=torch.ones(rows) if sample_mask is None else torch.tensor(sample_mask),
    )


def loss_of(given_inputs, **config):
    mask = given_inputs.token_mask[:, 1:] * given_inputs.sample_mask.unsqueeze(1)
    return clipped_policy_gradient_loss(
        given_inputs,
        LossConfig(**config),
        global_valid_tokens=float(mask.sum()),
        global_valid_sequences=float(given_inputs.sample_mask.sum()),
    )


def logs(*ratios):
    return [[math.log(ratio) for ratio in ratios]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.1, 2.0, -2.2),
        (1.5, 1.0, -1.3),  # above 1 + ratio_clip_max: no further gain
        (0.5, 1.0, -0.5),  # a worse ratio is never clipped
        (0.5, -1.0, 0.8),  # below 1 - ratio_clip_min
        (1.5, -1.0, 1.5),
        (10.0, -1.0, 3.0),  # dual clip
        (10.0, 1.0, -1.3),
    ],
)
def test_clips_the_ratio_on_the_side_of_the_advantage(ratio, advantage, expected):
    loss, metrics = loss_of(
        inputs(logs(ratio), [[0.0]], advantages=advantage),
        ratio_clip_min=0.2,
        ratio_clip_max=0.3,
        ratio_clip_c=3.0,
    )
    assert loss.item() == pytest.approx(expected)
    assert metrics["probs_ratio"].item() == pytest.approx(ratio)
    assert metrics["probs_ratio_max"].item() == pytest.approx(ratio)
    assert metrics["probs_ratio_clamped_max"].item() == pytest.approx(min(max(ratio, 0.8), 1.3))


def test_split_and_merged_traces_have_one_objective():
    # rollout A owns 1 + 2 tokens, its sibling B owns 1; advantages +1 and -1, ratio 1
    merged = inputs([[0.0] * 3, [0.0] * 3], advantages=[[1.0] * 3, [-1.0] * 3],
                    token_mask=[[1, 1, 1], [1, 0, 0]])  # fmt: skip
    split = inputs(
        [[0.0] * 3] * 4,
        advantages=[[1.0] * 3, [1.0] * 3, [-1.0] * 3, [0.0] * 3],
        token_mask=[[1, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]],
        sample_mask=[1.0, 1.0, 1.0, 0.0],
    )
    for each in (merged, split):
        loss, _ = loss_of(each)
        assert loss.item() == pytest.approx(-0.5)
        loss.backward()
    total = merged.curr_logprobs.grad[:, 1:].sum()
    assert total.item() == pytest.approx(split.curr_logprobs.grad[:, 1:].sum().item())


def test_masked_positions_and_rows_carry_no_gradient_whatever_they_hold():
    given_inputs = inputs(
        [[-1.0, -math.inf], [math.nan, -1.0]], token_mask=[[1, 0], [1, 1]], sample_mask=[1.0, 0.0]
    )
    loss, _ = loss_of(given_inputs)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert given_inputs.curr_logprobs.grad.tolist() == [[0, pytest.approx(-1), 0], [0, 0, 0]]


def test_row_level_loss_weighs_rows_equally():
    given_inputs = inputs(
        [[0.0] * 3, [0.0] * 3], advantages=[[1.0] * 3, [-3.0] * 3],
        token_mask=[[1, 1, 1], [1, 0, 0]],
    )  # fmt: skip
    assert loss_of(given_inputs, token_level_loss=True)[0].item() == pytest.approx(0.0)
    assert loss_of(given_inputs, token_level_loss=False)[0].item() == pytest.approx(1.0)


def test_sequence_level_ratios_are_the_geometric_mean():
    given_inputs = inputs(logs(2.0, 0.5, 8.0), [[0.0] * 3], token_mask=[[1, 1, 0]])
    _, metrics = loss_of(
        given_inputs, sequence_level_importance_ratios=True, token_level_loss=False
    )
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("config", "weights", "outside"),
    [
        ({}, [4.0, 0.25, 1.0], 0),
        (
            {
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            },
            [2.0, 0.25, 1.0],
            1,
        ),
        (
            {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            [0.0, 0.0, 1.0],
            2,
        ),
        (  # geometric mean 1: the sequence stays, with raw weights
            {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.1,
                "truncated_importance_sampling_ratio_min": 0.9,
            },
            [4.0, 0.25, 1.0],
            0,
        ),
        (
            {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 0.9,
                "truncated_importance_sampling_ratio_min": 0.1,
            },
            [0.0, 0.0, 0.0],
            3,
        ),
    ],
)
def test_importance_sampling_correction(config, weights, outside):
    given_inputs = inputs([[0.0] * 3], [[0.0] * 3], gen=logs(0.25, 4.0, 1.0))
    loss, metrics = loss_of(given_inputs, use_importance_sampling_correction=True, **config)
    loss.backward()
    gradient = given_inputs.curr_logprobs.grad[0, 1:]
    assert gradient.tolist() == pytest.approx([-weight / 3 for weight in weights])
    assert metrics["sampling_importance_ratio"].item() == pytest.approx(sum(weights) / 3)
    assert metrics["is_oob_ratio"].item() == pytest.approx(outside / 3)


def test_an_infinite_weight_becomes_zero():
    given_inputs = inputs([[0.0]], [[0.0]], gen=[[-1000.0]])
    assert loss_of(given_inputs, use_importance_sampling_correction=True)[0].item() == 0


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)]
)
def test_kl_estimators(kind, expected):
    given_inputs = inputs([[-1.0]], ref=[[-0.5]], advantages=0.0)
    loss, metrics = loss_of(
        given_inputs, reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind
    )
    assert loss.item() == pytest.approx(0.1 * expected)
    assert metrics["kl_penalty"].item() == pytest.approx(0.1 * expected)


def test_kl_is_clamped_on_both_ends():
    far = inputs([[-100.0]], ref=[[-1.0]], advantages=0.0)
    loss, _ = loss_of(far, reference_policy_kl_penalty=1.0)
    assert loss.item() == pytest.approx(10.0)
    loss, _ = loss_of(far, reference_policy_kl_penalty=1.0, kl_output_clamp_value=None)
    assert loss.item() == pytest.approx(math.exp(20.0) - 21.0, rel=1e-6)


def test_forced_on_policy_needs_no_previous_logprobs_and_keeps_its_gradient():
    given_inputs = inputs([[-1.0, -2.0]], [[-9.0, -9.0]])
    loss, metrics = loss_of(given_inputs, force_on_policy_ratio=True)
    loss.backward()
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)
    assert given_inputs.curr_logprobs.grad[0, 1:].tolist() == pytest.approx([-0.5, -0.5])


def test_without_the_ratio_it_is_reinforce():
    loss, _ = loss_of(inputs([[-1.0, -2.0]], [[-9.0, -9.0]]), disable_ppo_ratio=True)
    assert loss.item() == pytest.approx(1.5)


def test_missing_logprobs_are_named():
    given_inputs = inputs([[-1.0]])
    with pytest.raises(ValueError, match="reference_logprobs"):
        loss_of(given_inputs, reference_policy_kl_penalty=0.1)
    without = LossInputs(**{**vars(given_inputs), "prev_logprobs": None})
    with pytest.raises(ValueError, match="prev_logprobs"):
        loss_of(without)


@given(st.integers(1, 4), st.randoms(use_true_random=False), st.booleans())
def test_micro_batches_add_up_to_the_whole(cut, random, token_level):
    def some():
        return [[random.uniform(-3, 0) for _ in range(4)] for _ in range(5)]

    whole = inputs(
        some(),
        some(),
        some(),
        some(),
        advantages=some(),
        token_mask=[[random.randint(0, 1) for _ in range(4)] for _ in range(5)],
        sample_mask=[1.0, 0.0, 1.0, 1.0, 1.0],
    )
    config = LossConfig(
        reference_policy_kl_penalty=0.1,
        token_level_loss=token_level,
        use_importance_sampling_correction=True,
    )
    tokens = float((whole.token_mask[:, 1:] * whole.sample_mask.unsqueeze(1)).sum())

    def share(rows):
        part = LossInputs(**{name: value[rows] for name, value in vars(whole).items()})
        return clipped_policy_gradient_loss(
            part, config, global_valid_tokens=tokens, global_valid_sequences=4.0
        )[1]

    all_rows, first, rest = share(slice(None)), share(slice(cut)), share(slice(cut, None))
    assert all_rows.keys() == {*SUMMED_METRICS, *MINIMA, *MAXIMA}
    for name in SUMMED_METRICS:
        assert (first[name] + rest[name]).item() == pytest.approx(all_rows[name].item(), abs=1e-9)
    for name in MINIMA:
        assert min(first[name], rest[name]) == all_rows[name]
    for name in MAXIMA:
        assert max(first[name], rest[name]) == all_rows[name]
