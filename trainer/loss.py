"""The clipped policy-gradient objective of GRPO. Pure torch: no torch.distributed.

With r = exp(curr - prev), A the advantage and w = exp(prev - gen) the importance weight of tokens
that were generated under other weights or another engine:

    token loss = w * max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max))

and, with dual clipping, at most -A * ratio_clip_c where A < 0 (arXiv:1912.09729). The KL penalty
to the reference policy is estimated per token by k1, k2 or k3 (joschu.net/blog/kl-approx.html).

Denominators are those of the whole optimizer step and come in as arguments, so the sum of the
losses of all micro-batches and ranks is the loss of the step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.config import LossConfig

MEAN_EPSILON = 1e-8
SUMMED_METRICS = (
    "loss",
    "kl_penalty",
    "is_oob_ratio",
    "sampling_importance_ratio",
    "num_valid_samples",
    "probs_ratio",
    "probs_ratio_clamped",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "approx_entropy",
)
MINIMA = ("probs_ratio_min", "probs_ratio_clamped_min")
MAXIMA = ("probs_ratio_max", "probs_ratio_clamped_max")


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Log-probabilities are [rows, S] float32 with token t's value at index t."""

    curr_logprobs: Tensor
    """Of the weights in training: the only input that carries a gradient."""
    prev_logprobs: Tensor | None
    """Of the weights at the start of the step; None only with `force_on_policy_ratio`."""
    generation_logprobs: Tensor
    """Reported by the engine that sampled the tokens."""
    reference_logprobs: Tensor | None
    """Of the reference policy; None where the KL penalty is 0."""
    advantages: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    """[rows]; all others [rows, S]."""


def clipped_policy_gradient_loss(
    inputs: LossInputs,
    config: LossConfig,
    *,
    global_valid_tokens: float,
    global_valid_sequences: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss (a scalar) and of its metrics.

    SUMMED_METRICS add up over micro-batches and ranks; MINIMA and MAXIMA are extremes.
    Raises ValueError where a needed log-probability is missing.
    """
    mask = inputs.token_mask[:, 1:] * inputs.sample_mask.unsqueeze(1)
    reduce = _Reduction(
        mask, inputs.sample_mask, global_valid_tokens, global_valid_sequences, config
    )
    current = _on(mask, inputs.curr_logprobs)
    generated = _on(mask, inputs.generation_logprobs)
    previous = _previous(inputs, config, mask, current)

    ratios, clipped_ratios = _ratios(current, previous, mask, config)
    per_token = _policy_terms(current, ratios, clipped_ratios, inputs.advantages[:, 1:], config)
    weights, out_of_bounds = importance_weights(previous, generated, mask, config)
    actor_loss = reduce.loss_mean(weights * per_token)
    kl_penalty = torch.zeros_like(actor_loss)
    if config.reference_policy_kl_penalty != 0:
        if inputs.reference_logprobs is None:
            raise ValueError(
                "reference_policy_kl_penalty is not 0 but there are no reference_logprobs"
            )
        divergence = _reference_kl(current, _on(mask, inputs.reference_logprobs), generated, config)
        kl_penalty = config.reference_policy_kl_penalty * reduce.loss_mean(divergence)
    loss = actor_loss + kl_penalty

    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "kl_penalty": kl_penalty.detach(),
            "is_oob_ratio": out_of_bounds / (global_valid_tokens + MEAN_EPSILON),
            "sampling_importance_ratio": reduce.token_mean(weights),
            "num_valid_samples": inputs.sample_mask.sum(),
            **_ratio_metrics(ratios, clipped_ratios, mask, reduce),
            **_agreement_metrics(current, previous, generated, reduce),
        }
    return loss, metrics


@dataclass(frozen=True)
class _Reduction:
    mask: Tensor
    sample_mask: Tensor
    global_valid_tokens: float
    global_valid_sequences: float
    config: LossConfig

    def token_mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / (self.global_valid_tokens + MEAN_EPSILON)

    def loss_mean(self, values: Tensor) -> Tensor:
        """Mean over all tokens of the step, or of each row's mean over the step's rows."""
        if self.config.token_level_loss:
            return self.token_mean(values)
        rows = row_mean(values, self.mask)
        return (rows * self.sample_mask).sum() / (self.global_valid_sequences + MEAN_EPSILON)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` [rows, T] where `mask` is 1, per row [rows]; 0 for an empty row."""
    return (values * mask).sum(dim=1) / (mask.sum(dim=1) + MEAN_EPSILON)


def _on(mask: Tensor, logprobs: Tensor) -> Tensor:
    # 0 off the mask: padding may score -inf, and -inf * 0 would be NaN
    return torch.where(mask > 0, logprobs[:, 1:], 0.0)


def _previous(inputs: LossInputs, config: LossConfig, mask: Tensor, current: Tensor) -> Tensor:
    if config.force_on_policy_ratio:
        return current.detach()
    if inputs.prev_logprobs is None:
        raise ValueError("prev_logprobs may only be missing with force_on_policy_ratio")
    return _on(mask, inputs.prev_logprobs)


def _ratios(
    current: Tensor, previous: Tensor, mask: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    log_ratios = current - previous
    if config.sequence_level_importance_ratios:
        log_ratios = row_mean(log_ratios, mask).unsqueeze(1).expand_as(current)
    ratios = log_ratios.exp()
    return ratios, ratios.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)


def _policy_terms(
    current: Tensor,
    ratios: Tensor,
    clipped_ratios: Tensor,
    advantages: Tensor,
    config: LossConfig,
) -> Tensor:
    if config.disable_ppo_ratio:
        return -advantages * current
    terms = torch.maximum(-advantages * ratios, -advantages * clipped_ratios)
    if config.ratio_clip_c is None:
        return terms
    ceiling = torch.minimum(terms, -advantages * config.ratio_clip_c)
    return torch.where(advantages < 0, ceiling, terms)


@torch.no_grad()
def importance_weights(
    previous: Tensor, generated: Tensor, mask: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Weights [rows, T] of log-probabilities [rows, T], and how many masked tokens fell outside.

    Without the correction the weights are 1. A weight that is not finite becomes 0.
    """
    if not config.use_importance_sampling_correction:
        return torch.ones_like(previous), torch.zeros((), device=previous.device)
    drift = previous - generated
    if config.sequence_level_importance_ratios:
        drift = (drift * mask).sum(dim=1, keepdim=True).expand_as(drift)
    weights = drift.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    upper = config.truncated_importance_sampling_ratio
    if upper is None:
        return weights, torch.zeros((), device=previous.device)
    lower = config.truncated_importance_sampling_ratio_min or 0.0
    judged = weights
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        judged = row_mean(previous - generated, mask).exp().unsqueeze(1).expand_as(weights)
    inside = (judged >= lower) & (judged <= upper)
    out_of_bounds = (~inside * mask).sum()
    if config.truncated_importance_sampling_type in ("icepop", "seq-mask-tis"):
        return torch.where(inside, weights, 0.0), out_of_bounds
    return weights.clamp(lower, upper), out_of_bounds


def _reference_kl(
    current: Tensor, reference: Tensor, generated: Tensor, config: LossConfig
) -> Tensor:
    log_ratio = reference - current
    if config.kl_input_clamp_value is not None:
        log_ratio = log_ratio.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    if config.reference_policy_kl_type == "k1":
        divergence = -log_ratio
    elif config.reference_policy_kl_type == "k2":
        divergence = log_ratio.square() / 2
    else:
        divergence = _k3(log_ratio)
    if config.kl_output_clamp_value is not None:
        divergence = divergence.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)
    anchor = generated if config.use_on_policy_kl_approximation else current.detach()
    return divergence * (current - anchor).exp().nan_to_num(nan=0.0, posinf=0.0)


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def _ratio_metrics(
    ratios: Tensor, clipped_ratios: Tensor, mask: Tensor, reduce: _Reduction
) -> dict[str, Tensor]:
    inside = mask > 0
    return {
        "probs_ratio": reduce.token_mean(ratios),
        "probs_ratio_clamped": reduce.token_mean(clipped_ratios),
        "probs_ratio_min": torch.where(inside, ratios, torch.inf).amin(),
        "probs_ratio_max": torch.where(inside, ratios, -torch.inf).amax(),
        "probs_ratio_clamped_min": torch.where(inside, clipped_ratios, torch.inf).amin(),
        "probs_ratio_clamped_max": torch.where(inside, clipped_ratios, -torch.inf).amax(),
    }


def _agreement_metrics(
    current: Tensor, previous: Tensor, generated: Tensor, reduce: _Reduction
) -> dict[str, Tensor]:
    """How far training and generation disagree on the same tokens under the same weights."""
    mixture = torch.logaddexp(previous, generated) - math.log(2.0)
    return {
        "token_mult_prob_error": reduce.token_mean((generated - previous).abs().exp()),
        "gen_kl_error": reduce.token_mean(_k3(previous - generated)),
        "policy_kl_error": reduce.token_mean(_k3(generated - previous)),
        "js_divergence_error": reduce.token_mean(
            (_k3(mixture - previous) + _k3(mixture - generated)) / 2
        ),
        "approx_entropy": -reduce.token_mean((current - generated).exp() * current),
    }
