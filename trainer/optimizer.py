"""Megatron's Adam and its learning-rate schedule, from the configuration's megatron section."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from schemas.config import PolicyConfig


def build_optimizer(
    config: PolicyConfig, model: DistributedDataParallel, dtype: torch.dtype
) -> MegatronOptimizer:
    """Adam with decoupled weight decay over all parameters; clips the global gradient norm."""
    settings = config.megatron_cfg.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=min(settings.min_lr, settings.lr),
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=config.max_grad_norm if settings.clip_grad is None else settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
        ),
        [model],
    )
    _complete_adam_state(optimizer)
    return optimizer


def _complete_adam_state(optimizer: MegatronOptimizer) -> None:
    # Adam makes its moments at the first step: without them the initial state cannot be saved.
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state.setdefault("step", torch.zeros(()))  # which megatron leaves out


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Sets the state that `dist_checkpointing` loaded for this optimizer."""
    if _torch_adams(optimizer):
        # megatron saves no step count of 0, and torch does not accept its absence
        of_adam = state.get("optimizer", state)  # mixed precision wraps it once more
        of_adam["state"].setdefault("common_step", torch.zeros(()))
    optimizer.load_state_dict(state)


def _torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Adam]:
    inner = [part.optimizer for part in _parts(optimizer)]
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam)]  # fused ones are not


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def build_schedule(
    config: PolicyConfig,
    optimizer: MegatronOptimizer,
    *,
    rollouts_per_step: int,
    max_num_steps: int,
) -> OptimizerParamScheduler:
    """Counts logical rollouts: an `iters` of the configuration is `rollouts_per_step` of them."""
    settings = config.megatron_cfg.optimizer
    shape = config.megatron_cfg.scheduler
    decay = max(shape.lr_decay_iters or max_num_steps, shape.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=min(shape.lr_warmup_init, settings.lr),
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=shape.lr_warmup_iters * rollouts_per_step,
        lr_decay_steps=decay * rollouts_per_step,
        lr_decay_style=shape.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay * rollouts_per_step,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
