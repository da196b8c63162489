"""Logical rollouts of whole prompt groups -> the physical rows of one training step.

A logical rollout owns one reward and one advantage; each of its traces is a physical row. An
eligible trace fits `max_total_sequence_length`, owns a sampled token and belongs to a rollout that
is not masked. A rollout without an eligible trace takes no part in its group's baseline. What is
not eligible stays as an inert row (two padding tokens, weight 0), so ids stay aligned.

Pure: numpy and torch on the CPU, no Kafka, no torch.distributed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas import vectors
from schemas.config import Config
from schemas.records import RolloutRow, Trace
from trainer.advantages import clip_advantages, group_advantages

INERT_LENGTH = 2  # the shortest row that has a next token to score


@dataclass(frozen=True)
class BatchSettings:
    """How a step's rows are built; the names are NeMo RL's where it has one."""

    max_total_sequence_length: int
    pad_token_id: int
    row_multiple: int = 1
    """Rows are padded to a multiple of this: data-parallel size x micro-batch size."""
    make_sequence_length_divisible_by: int = 1
    gym_multi_trace: bool = False
    """Off: a rollout with more than one trace is masked and counted."""
    overlong_filtering: bool = False
    """On: a truncated rollout is masked."""
    use_leave_one_out_baseline: bool = True
    normalize_rewards: bool = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None

    @classmethod
    def from_config(
        cls, config: Config, *, pad_token_id: int, data_parallel_size: int
    ) -> "BatchSettings":
        """Rows divide into micro-batches on every data-parallel rank."""
        grpo, policy = config.grpo, config.policy
        micro = policy.train_micro_batch_size
        return cls(
            max_total_sequence_length=policy.max_total_sequence_length,
            pad_token_id=pad_token_id,
            row_multiple=data_parallel_size * math.lcm(micro, policy.logprob_batch_size or micro),
            make_sequence_length_divisible_by=policy.make_sequence_length_divisible_by,
            gym_multi_trace=grpo.gym_multi_trace,
            overlong_filtering=grpo.overlong_filtering,
            use_leave_one_out_baseline=grpo.use_leave_one_out_baseline,
            normalize_rewards=grpo.normalize_rewards,
            advantage_clip_low=grpo.advantage_clip_low,
            advantage_clip_high=grpo.advantage_clip_high,
        )


@dataclass(frozen=True)
class TrainingBatch:
    """All physical rows of one step, right-padded to S tokens."""

    input_ids: Tensor
    """[rows, S] int64; `pad_token_id` beyond a row's length."""
    input_lengths: Tensor
    """[rows] int64; 2 for an inert row."""
    token_mask: Tensor
    """[rows, S] float32; 1 where the policy sampled the token. Never 1 at position 0."""
    generation_logprobs: Tensor
    """[rows, S] float32; 0 where `token_mask` is 0."""
    advantages: Tensor
    """[rows, S] float32; the logical rollout's advantage at every position, 0 in inert rows."""
    sample_mask: Tensor
    """[rows] float32; 1 for an eligible row."""
    logical_index: tuple[int, ...]
    """Per row, its logical rollout's position in the step; 0 for padding rows."""
    task_indices: tuple[int, ...]
    """Per row, its prompt group; -1 for padding rows."""
    rollout_ids: tuple[str, ...]
    """Per row; "" for padding rows."""
    trace_ids: tuple[str, ...]
    """Per row; "" for padding rows and for rollouts that keep no trace."""
    logical_rollouts: int
    """Rollouts of the step, valid or not: what the learning-rate schedule counts."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Physical rows, padding included."""
        return self.input_ids.shape[0]

    @property
    def eligible_tokens(self) -> int:
        """Owned tokens of eligible rows: the global denominator of the token-level loss."""
        return int((self.token_mask[:, 1:] * self.sample_mask.unsqueeze(1)).sum().item())


@dataclass(frozen=True)
class _Row:
    """One physical row before padding; without token ids it is inert."""

    logical_index: int
    task_index: int
    rollout_id: str
    trace_id: str
    token_ids: NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None
    mask: NDArray[np.float32] | None = None

    @property
    def length(self) -> int:
        return INERT_LENGTH if self.token_ids is None else len(self.token_ids)


def build_batch(groups: Sequence[Sequence[RolloutRow]], settings: BatchSettings) -> TrainingBatch:
    """The rows of a step from its groups (each: G rollouts in `row_index` order), in that order.

    Raises ValueError, naming task and row, for a reward that is not finite, a rollout id that
    occurs twice, groups of different sizes and vectors or spans that do not fit each other.
    """
    rollouts = _checked(groups)
    rows: list[_Row] = []
    counts = {"overlong_traces": 0, "multi_trace_rollouts": 0}
    valid = torch.zeros(len(rollouts))
    for index, rollout in enumerate(rollouts):
        expanded = _expand(index, rollout, settings, counts)
        valid[index] = float(any(row.token_ids is not None for row in expanded))
        rows.extend(expanded)
    physical = len(rows)
    padding = -physical % settings.row_multiple
    rows += [_Row(0, -1, "", "")] * padding

    shape = (len(groups), -1)
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    advantages = group_advantages(
        rewards.view(shape),
        valid.view(shape),
        leave_one_out=settings.use_leave_one_out_baseline,
        normalize=settings.normalize_rewards,
    )
    advantages = clip_advantages(
        advantages, settings.advantage_clip_low, settings.advantage_clip_high
    ).view(-1)
    metrics = {
        "gym/logical_rollouts": float(len(rollouts)),
        "gym/physical_rows": float(physical),
        "gym/padding_rows": float(padding),
        "gym/overlong_traces": float(counts["overlong_traces"]),
        "gym/multi_trace_rollouts": float(counts["multi_trace_rollouts"]),
        "gym/invalid_rollouts": float(len(rollouts) - int(valid.sum().item())),
    }
    return _pad(rows, advantages * valid, len(rollouts), settings, metrics)


def _checked(groups: Sequence[Sequence[RolloutRow]]) -> list[RolloutRow]:
    if not groups:
        raise ValueError("a step without groups has no batch: skip it as a zero update")
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"groups of one step must have one size, got {sorted(sizes)}")
    rollouts = [rollout for group in groups for rollout in group]
    seen: dict[str, RolloutRow] = {}
    for rollout in rollouts:
        where = _name(rollout)
        if not math.isfinite(rollout.reward):
            raise ValueError(f"{where}: reward {rollout.reward} is not finite")
        twin = seen.setdefault(rollout.rollout_id, rollout)
        if twin is not rollout:
            raise ValueError(
                f"{where}: rollout_id {rollout.rollout_id!r} is also that of {_name(twin)}"
            )
    return rollouts


def _name(rollout: RolloutRow) -> str:
    return f"task {rollout.task_index} row {rollout.row_index}"


def _expand(
    index: int, rollout: RolloutRow, settings: BatchSettings, counts: dict[str, int]
) -> list[_Row]:
    """The rollout's rows in trace order: one a trace, or one inert row where none is kept."""
    identity = (index, rollout.task_index, rollout.rollout_id)
    too_many = len(rollout.traces) > 1 and not settings.gym_multi_trace
    counts["multi_trace_rollouts"] += too_many
    if too_many or not rollout.traces:
        return [_Row(*identity, "")]
    masked = rollout.masked or (settings.overlong_filtering and rollout.truncated)
    rows = []
    for trace in rollout.traces:
        token_ids, logprobs, mask = _vectors(rollout, trace)
        overlong = len(token_ids) > settings.max_total_sequence_length
        counts["overlong_traces"] += overlong
        if masked or overlong or not mask.any():
            rows.append(_Row(*identity, trace.trace_id))
        else:
            rows.append(_Row(*identity, trace.trace_id, token_ids, logprobs, mask))
    return rows


def _vectors(
    rollout: RolloutRow, trace: Trace
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    token_ids = vectors.tokens(trace.token_ids)
    logprobs = vectors.logprobs(trace.generation_logprobs)
    where = f"{_name(rollout)} trace {trace.trace_id!r}"
    if len(token_ids) != len(logprobs):
        raise ValueError(
            f"{where}: {len(logprobs)} generation_logprobs for {len(token_ids)} token_ids"
        )
    mask = np.zeros(len(token_ids), dtype=np.float32)
    for span in trace.sampled_spans:
        if not 0 < span.start < span.end <= len(token_ids):
            raise ValueError(
                f"{where}: span [{span.start}, {span.end}) must lie in [1, {len(token_ids)})"
            )
        if mask[span.start : span.end].any():
            raise ValueError(f"{where}: span [{span.start}, {span.end}) overlaps another one")
        mask[span.start : span.end] = 1.0
    if not np.isfinite(logprobs[mask > 0]).all():
        raise ValueError(f"{where}: a sampled token's generation_logprob is not finite")
    return token_ids, logprobs, mask


def _pad(
    rows: list[_Row],
    advantages: Tensor,
    logical_rollouts: int,
    settings: BatchSettings,
    metrics: dict[str, float],
) -> TrainingBatch:
    multiple = settings.make_sequence_length_divisible_by
    width = -(-max(row.length for row in rows) // multiple) * multiple
    input_ids = np.full((len(rows), width), settings.pad_token_id, dtype=np.int64)
    logprobs = np.zeros((len(rows), width), dtype=np.float32)
    mask = np.zeros((len(rows), width), dtype=np.float32)
    eligible = np.zeros(len(rows), dtype=np.float32)
    for place, row in enumerate(rows):
        if row.token_ids is None or row.logprobs is None or row.mask is None:
            continue
        input_ids[place, : row.length] = row.token_ids
        mask[place, : row.length] = row.mask
        logprobs[place, : row.length] = np.where(row.mask > 0, row.logprobs, 0.0)
        eligible[place] = 1.0
    sample_mask = torch.from_numpy(eligible)
    logical_index = tuple(row.logical_index for row in rows)
    per_row = advantages[list(logical_index)].float() * sample_mask
    return TrainingBatch(
        input_ids=torch.from_numpy(input_ids),
        input_lengths=torch.tensor([row.length for row in rows], dtype=torch.int64),
        token_mask=torch.from_numpy(mask),
        generation_logprobs=torch.from_numpy(logprobs),
        advantages=per_row.unsqueeze(1).expand(-1, width).contiguous(),
        sample_mask=sample_mask,
        logical_index=logical_index,
        task_indices=tuple(row.task_index for row in rows),
        rollout_ids=tuple(row.rollout_id for row in rows),
        trace_ids=tuple(row.trace_id for row in rows),
        logical_rollouts=logical_rollouts,
        metrics=metrics,
    )
