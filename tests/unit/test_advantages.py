import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import baseline, clip_advantages, group_advantages

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def of(rewards, valid=None, *, leave_one_out=True, normalize=True):
    valid = [1.0] * len(rewards) if valid is None else valid
    advantages = group_advantages(
        torch.tensor([rewards], dtype=torch.float64),
        torch.tensor([valid]),
        leave_one_out=leave_one_out,
        normalize=normalize,
    )
    assert advantages.dtype == torch.float64
    return advantages[0].tolist()


@pytest.mark.parametrize(
    ("rewards", "leave_one_out", "expected"),
    [
        ([1, 0, 0, 0], True, [1, -0.577349, -0.577349, -0.577349]),
        ([1, 1, 0, 0], True, [1.154699, 1.154699, -1.154699, -1.154699]),
        ([1, 1, 1, 0], True, [0.577349, 0.577349, 0.577349, -1]),
        ([1, 0, 0, 0], False, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], False, [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1, 0], True, [1, -1]),
        ([1, 0], False, [0.707106, -0.707106]),
        ([3, 3, 3], True, [0, 0, 0]),
        ([0.1, 0.1, 0.1], False, [0, 0, 0]),
        ([5], True, [0]),
        ([5], False, [0]),
    ],
)
def test_golden_values(rewards, leave_one_out, expected):
    assert of(rewards, leave_one_out=leave_one_out) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("leave_one_out", "expected"), [(True, 1.0), (False, 0.5)])
def test_invalid_members_do_not_vote(leave_one_out, expected):
    advantages = of(
        [1, 0, 100, math.nan], [1, 1, 0, 0], leave_one_out=leave_one_out, normalize=False
    )
    assert advantages == [expected, -expected, 0, 0]


def test_one_or_no_valid_member_has_no_advantage():
    assert of([7, 1], [1, 0]) == [0, 0]
    assert of([7, 1], [0, 0]) == [0, 0]


@pytest.mark.parametrize("odd", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [0.0, 5e-8])
def test_rounding_residue_is_no_spread(odd, dtype, noise):
    rewards = torch.full((1, 8), 0.35, dtype=dtype)
    rewards[0, ::2] += noise
    rewards[0, odd] = 1.0
    advantages = group_advantages(rewards, torch.ones(1, 8))
    assert advantages[0, odd].item() == pytest.approx(0.65, abs=1e-6)
    assert advantages.abs().max() < 1


def test_two_valid_members_have_no_std():
    _, std = baseline(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2), leave_one_out=True)
    assert std.tolist() == [[0, 0]]


@given(REWARDS, st.booleans(), st.booleans())
def test_a_constant_group_is_exactly_zero(rewards, leave_one_out, normalize):
    constant = [rewards[0]] * len(rewards)
    assert of(constant, leave_one_out=leave_one_out, normalize=normalize) == [0] * len(rewards)


@given(REWARDS, st.data(), st.booleans(), st.booleans())
def test_invalid_members_change_nothing(rewards, data, leave_one_out, normalize):
    valid = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    settings = {"leave_one_out": leave_one_out, "normalize": normalize}
    among_all = of(rewards, [float(v) for v in valid], **settings)
    kept = [reward for reward, v in zip(rewards, valid, strict=True) if v]
    alone = iter(of(kept, **settings) if kept else [])
    expected = [next(alone) if v else 0.0 for v in valid]
    assert among_all == pytest.approx(expected, abs=1e-6, rel=1e-6)


@given(REWARDS, st.booleans())
def test_without_normalising_it_is_the_distance_to_the_others_mean(rewards, leave_one_out):
    advantages = of(rewards, leave_one_out=leave_one_out, normalize=False)
    for i, reward in enumerate(rewards):
        peers = [r for j, r in enumerate(rewards) if j != i or not leave_one_out]
        expected = reward - sum(peers) / len(peers) if len(rewards) > 1 else 0.0
        assert advantages[i] == pytest.approx(expected, abs=1e-9)


@given(REWARDS)
def test_order_of_members_is_kept_and_signs_follow_rewards(rewards):
    advantages = of(rewards)
    if len(rewards) > 1 and max(rewards) - min(rewards) > 1e-3:
        assert advantages[rewards.index(max(rewards))] > 0
        assert advantages[rewards.index(min(rewards))] < 0


def test_clipping_is_open_where_a_bound_is_none():
    advantages = torch.tensor([-3.0, 0.5, 3.0])
    assert clip_advantages(advantages, None, None).tolist() == [-3, 0.5, 3]
    assert clip_advantages(advantages, -1.0, None).tolist() == [-1, 0.5, 3]
    assert clip_advantages(advantages, -1.0, 2.0).tolist() == [-1, 0.5, 2]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"):
        group_advantages(torch.zeros(1, 2), torch.ones(1, 3))
