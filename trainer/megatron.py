"""The policy in training: model, optimizer and schedule of megatron-core behind four calls.

    parallel.start(ModelParallel(tensor, pipeline), seed=...)    # trainer/parallel.py, every rank
    policy = Policy(config.policy, rollouts_per_step=N * G, max_num_steps=...)
    prev = policy.logprobs(batch)                                # [rows, S]
    metrics = policy.train_step(batch, config.loss_fn, prev_logprobs=prev)   # one update
    weights.export_weights(policy.model, policy.architecture, source, target, token)
    checkpoint.save(policy, target, token, progress); checkpoint.restore(policy, directory)

All calls are collective and take the same whole batch on every rank: a data-parallel rank computes
its own rows. The same batch on the same ranks gives the same bits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from torch import Tensor, distributed

from schemas.config import LossConfig, PolicyConfig
from schemas.errors import ConfigError
from trainer import cpu
from trainer.architecture import Architecture, read_architecture
from trainer.gpt import build_model
from trainer.loss import (
    MAXIMA,
    MINIMA,
    SUMMED_METRICS,
    LossInputs,
    clipped_policy_gradient_loss,
)
from trainer.optimizer import build_optimizer, build_schedule
from trainer.parallel import data_parallel_rank, data_parallel_size
from trainer.traces import TrainingBatch
from trainer.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """The trained model on this rank, with its optimizer and learning-rate schedule."""

    def __init__(self, config: PolicyConfig, *, rollouts_per_step: int, max_num_steps: int) -> None:
        """Builds the model of the directory `config.model_name` with its weights.

        `parallel.start` comes first. Raises ConfigError for a model that is not computed here.
        """
        self.architecture: Architecture = read_architecture(Path(config.model_name))
        self.micro_batch_size = config.train_micro_batch_size
        self.logprob_batch_size = config.logprob_batch_size or config.train_micro_batch_size
        self.temperature = config.generation.temperature
        dtype = DTYPES[config.precision]
        self.model: GPTModel = build_model(self.architecture, dtype)
        load_weights(self.model, self.architecture, Path(config.model_name))
        self.model.to(cpu.device())
        self._reference: dict[str, Tensor] | None = None

        module = (
            self.model if dtype is torch.float32 else Float16Module(self.model.config, self.model)
        )
        self.ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module,
        )
        self.model.config.finalize_model_grads_func = _add_up_gradients
        self.optimizer = build_optimizer(config, self.ddp, dtype)
        self.schedule = build_schedule(
            config,
            self.optimizer,
            rollouts_per_step=rollouts_per_step,
            max_num_steps=max_num_steps,
        )

    def keep_reference(self) -> None:
        """Keeps a copy of the present weights on the CPU, for `reference_logprobs`."""
        self._reference = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in self.model.named_parameters()
        }

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        """As `logprobs`, by the weights that `keep_reference` kept."""
        if self._reference is None:
            raise RuntimeError("keep_reference() must come before reference_logprobs()")
        present = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        _set_parameters(self.model, self._reference)
        try:
            return self.logprobs(batch)
        finally:
            _set_parameters(self.model, present)

    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """[rows, S] float32 on the CPU: index t has the log-probability of token t, index 0 is 0.

        At the sampling temperature, of every token: mask it with `token_mask` where that matters.
        """
        rows = self._own_rows(batch)
        size = math.gcd(len(rows), self.logprob_batch_size)  # pipeline stages need equal shapes
        self.ddp.eval()
        with torch.no_grad():
            outputs = self._run(batch, rows, size, forward_only=True, score=_collect)
        local = torch.zeros(len(rows), batch.input_ids.shape[1], device=cpu.device())
        if outputs:
            local = torch.cat(outputs)
        _from_last_stage(local)
        gathered = [torch.empty_like(local) for _ in range(data_parallel_size())]
        distributed.all_gather(gathered, local, group=parallel_state.get_data_parallel_group())
        return torch.cat(gathered).cpu()

    def train_step(
        self,
        batch: TrainingBatch,
        loss_config: LossConfig,
        *,
        prev_logprobs: Tensor | None,
        reference_logprobs: Tensor | None = None,
    ) -> dict[str, float]:
        """One optimizer update from all rows; the schedule advances by the logical rollouts.

        Without an eligible token nothing is updated and `zero_update` is 1. Raises ValueError for
        missing log-probabilities and RuntimeError for a gradient that is not finite: the weights
        are unchanged then.
        """
        tokens, sequences = batch.eligible_tokens, int(batch.sample_mask.sum().item())
        metrics = {
            "global_valid_toks": float(tokens),
            "global_valid_seqs": float(sequences),
            "zero_update": float(tokens == 0),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "grad_norm": 0.0,
        }
        if tokens:
            score = partial(
                _loss,
                loss_config=loss_config,
                denominators=(float(tokens), float(sequences)),
            )
            metrics |= self._update(batch, score, prev_logprobs, reference_logprobs)
        self.schedule.step(increment=batch.logical_rollouts)
        return metrics

    def _update(
        self,
        batch: TrainingBatch,
        score: Callable[..., Any],
        prev_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
    ) -> dict[str, float]:
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows = self._own_rows(batch)
        outputs = self._run(
            batch,
            rows,
            self.micro_batch_size,
            forward_only=False,
            score=score,
            prev_logprobs=prev_logprobs,
            reference_logprobs=reference_logprobs,
        )
        metrics = _reduce_metrics(outputs)
        _refuse_broken_gradients(self.ddp, metrics["loss"])
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError(f"the optimizer refused the step: gradient norm {grad_norm}")
        return metrics | {"grad_norm": float(grad_norm)}

    def _own_rows(self, batch: TrainingBatch) -> range:
        ranks, size = data_parallel_size(), self.micro_batch_size
        if batch.rows % (ranks * size):
            raise ConfigError(
                f"{batch.rows} rows do not divide by {ranks} data-parallel ranks x micro-batches "
                f"of {size}: build the batch with row_multiple {ranks * size}"
            )
        share = batch.rows // ranks
        return range(data_parallel_rank() * share, (data_parallel_rank() + 1) * share)

    def _run(
        self,
        batch: TrainingBatch,
        rows: range,
        size: int,
        *,
        forward_only: bool,
        score: Callable[..., Any],
        prev_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> list[Any]:
        """What `score` returned for each micro-batch; empty except on the last pipeline stage."""
        micro_batches = [
            _MicroBatch.cut(batch, slice(start, start + size), prev_logprobs, reference_logprobs)
            for start in range(rows.start, rows.stop, size)
        ]

        def forward_step(
            source: Iterator["_MicroBatch"], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(source)
            logits = model(micro_batch.input_ids, micro_batch.position_ids, None)
            return logits, partial(self._score, micro_batch, score)

        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=batch.input_ids.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def _score(
        self,
        micro_batch: "_MicroBatch",
        score: Callable[..., Any],
        logits: Tensor,
        non_loss_data: bool = False,  # megatron passes it where only outputs are collected
    ) -> Any:
        logprobs = token_logprobs(
            logits, micro_batch.input_ids, self.temperature, self.architecture.vocab_size
        )
        return score(logprobs, micro_batch)


def token_logprobs(
    logits: Tensor, input_ids: Tensor, temperature: float, vocab_size: int
) -> Tensor:
    """[rows, S] float32 from this rank's logits [rows, S, padded vocab / TP] and ids [rows, S].

    Index t has log softmax(logits[t - 1] / temperature)[input_ids[t]]; index 0 is 0.
    """
    # a copy: the cross entropy works in place
    scaled = logits[:, :-1].float() / temperature
    first = parallel_state.get_tensor_model_parallel_rank() * scaled.shape[-1]
    real = vocab_size - first
    if real < scaled.shape[-1]:  # padding of the vocabulary is not a token
        scaled[..., max(real, 0) :] = torch.finfo(scaled.dtype).min
    losses = vocab_parallel_cross_entropy(scaled.contiguous(), input_ids[:, 1:].contiguous())
    return torch.nn.functional.pad(-losses, (1, 0))


@dataclass(frozen=True)
class _MicroBatch:
    """Some rows of the batch, on this rank's device."""

    input_ids: Tensor
    position_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    advantages: Tensor
    generation_logprobs: Tensor
    prev_logprobs: Tensor | None
    reference_logprobs: Tensor | None

    @classmethod
    def cut(
        cls,
        batch: TrainingBatch,
        rows: slice,
        prev_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
    ) -> "_MicroBatch":
        device = cpu.device()
        input_ids = batch.input_ids[rows].to(device)
        return cls(
            input_ids=input_ids,
            position_ids=torch.arange(input_ids.shape[1], device=device).expand_as(input_ids),
            token_mask=batch.token_mask[rows].to(device),
            sample_mask=batch.sample_mask[rows].to(device),
            advantages=batch.advantages[rows].to(device),
            generation_logprobs=batch.generation_logprobs[rows].to(device),
            prev_logprobs=None if prev_logprobs is None else prev_logprobs[rows].to(device),
            reference_logprobs=(
                None if reference_logprobs is None else reference_logprobs[rows].to(device)
            ),
        )


def _collect(logprobs: Tensor, micro_batch: _MicroBatch) -> Tensor:
    return logprobs


def _loss(
    logprobs: Tensor,
    micro_batch: _MicroBatch,
    *,
    loss_config: LossConfig,
    denominators: tuple[float, float],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, megatron's token count (unused: the loss has its denominator) and metrics."""
    loss, metrics = clipped_policy_gradient_loss(
        LossInputs(
            curr_logprobs=logprobs,
            prev_logprobs=micro_batch.prev_logprobs,
            generation_logprobs=micro_batch.generation_logprobs,
            reference_logprobs=micro_batch.reference_logprobs,
            advantages=micro_batch.advantages,
            token_mask=micro_batch.token_mask,
            sample_mask=micro_batch.sample_mask,
        ),
        loss_config,
        global_valid_tokens=denominators[0],
        global_valid_sequences=denominators[1],
    )
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics


def _add_up_gradients(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    # without the token count megatron leaves the sums alone: every loss term is already divided
    finalize_model_grads(model, None, **options)


def _refuse_broken_gradients(ddp: DistributedDataParallel, loss: float) -> None:
    """Adam would carry one NaN into every weight; all ranks must refuse together."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    broken = torch.stack([~buffer.grad_data.isfinite().all() for buffer in buffers]).any().float()
    distributed.all_reduce(broken, op=distributed.ReduceOp.MAX)
    if broken.item():
        raise RuntimeError(
            f"the step's gradient is not finite (loss {loss}); the weights are unchanged"
        )


def _set_parameters(model: GPTModel, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def _from_last_stage(values: Tensor) -> None:
    """Only the last pipeline stage has results; in place, the others get them too."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        distributed.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )


def _reduce_metrics(per_micro_batch: list[dict[str, Tensor]]) -> dict[str, float]:
    """The step's metrics, the same on every rank."""
    sums = torch.zeros(len(SUMMED_METRICS), device=cpu.device())
    extremes = torch.full((len(MINIMA) + len(MAXIMA),), -torch.inf, device=cpu.device())
    for metrics in per_micro_batch:
        sums += torch.stack([metrics[name] for name in SUMMED_METRICS])
        lows = [-metrics[name] for name in MINIMA]
        highs = [metrics[name] for name in MAXIMA]
        extremes = torch.maximum(extremes, torch.stack(lows + highs))
    group = parallel_state.get_data_parallel_group()
    distributed.all_reduce(sums, group=group)
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=group)
    _from_last_stage(sums)
    _from_last_stage(extremes)
    reduced = dict(zip(SUMMED_METRICS, sums.tolist(), strict=True))
    found = extremes.tolist()
    reduced |= {name: -value for name, value in zip(MINIMA, found, strict=False)}
    return reduced | dict(zip(MAXIMA, found[len(MINIMA) :], strict=True))
