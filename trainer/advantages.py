"""GRPO advantages of prompt groups. Pure tensors: no torch.distributed, no clock.

For a group of rewards r with validity v, N = sum(v), minus one with the leave-one-out baseline:

    mean_i = sum_j r_j v_j / N                          (j != i with leave-one-out)
    std_i  = sqrt(sum_j (r_j - mean_i)^2 v_j / (N - 1)) (0 where N < 2)
    A_i    = (r_i - mean_i) / (std_i + 1e-6), or r_i - mean_i where std_i is 0

A group with fewer than two valid members has no baseline, so its advantages are 0.
"""

import torch
from torch import Tensor

NORMALIZE_EPSILON = 1e-6
# Seven rewards of 0.35 and one of 1: rounding leaves the seven a std of 1e-17 to 1e-8 instead of 0,
# and dividing by it would multiply the eighth's advantage by up to 1e6.
STD_FLOOR = 1e-6  # relative to the largest valid |reward| of the group


def group_advantages(
    rewards: Tensor, valid: Tensor, *, leave_one_out: bool = True, normalize: bool = True
) -> Tensor:
    """Advantages [groups, G], float64, of `rewards` [groups, G] under `valid` [groups, G] (0/1).

    0 for invalid members and in groups with fewer than two valid ones. The value of an invalid
    member's reward has no influence, NaN included.
    """
    mean, std = baseline(rewards, valid, leave_one_out=leave_one_out)
    counts = valid.bool()
    advantages = torch.where(counts, rewards.double(), 0.0) - mean
    if normalize:
        advantages = torch.where(std > 0, advantages / (std + NORMALIZE_EPSILON), advantages)
    usable = counts & (counts.sum(dim=1, keepdim=True) >= 2)
    return torch.where(usable, advantages, 0.0)


def baseline(rewards: Tensor, valid: Tensor, *, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation that each member is compared with: two float64 [groups, G].

    A std that is only rounding residue is exactly 0. Meaningless where fewer than two are valid.
    """
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and valid {tuple(valid.shape)} must both be "
            "[groups, G]"
        )
    counts = valid.bool()
    known = torch.where(counts, rewards.double(), 0.0)
    first = known.gather(1, counts.to(torch.int8).argmax(dim=1, keepdim=True))
    centred = torch.where(counts, known - first, 0.0)  # a constant group becomes exact zeros

    members = rewards.shape[1]
    peers = counts.double().unsqueeze(1).expand(-1, members, -1)  # [groups, member, peer]
    if leave_one_out:
        peers = peers * (1.0 - torch.eye(members, dtype=torch.float64, device=rewards.device))
    n_peers = peers.sum(dim=2)
    mean = (peers * centred.unsqueeze(1)).sum(dim=2) / n_peers.clamp(min=1)
    squares = (peers * (centred.unsqueeze(1) - mean.unsqueeze(2)) ** 2).sum(dim=2)
    std = (squares / (n_peers - 1).clamp(min=1)).sqrt()
    floor = STD_FLOOR * known.abs().amax(dim=1, keepdim=True)
    return mean + first, torch.where(std > floor, std, 0.0)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamps to [low, high] after normalisation; None leaves that side open."""
    if low is None and high is None:
        return advantages
    return advantages.clamp(min=low, max=high)
