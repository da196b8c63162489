"""Process groups of one training job: torch.distributed, then megatron's parallel state."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import distributed

from schemas.errors import ConfigError
from trainer import cpu


@dataclass(frozen=True)
class ModelParallel:
    """How many ranks share one copy of the model; all further ranks are data parallel."""

    tensor: int = 1
    pipeline: int = 1


def start(parallel: ModelParallel, *, seed: int, timeout_s: float = 600.0) -> None:
    """Joins the job that torchrun's environment describes, or a job of this process alone.

    Every collective fails after `timeout_s`. Raises ConfigError where the ranks do not divide.
    """
    cpu.install()
    if not distributed.is_initialized():
        _join(timedelta(seconds=timeout_s))
    world = distributed.get_world_size()
    if world % (parallel.tensor * parallel.pipeline):
        raise ConfigError(
            f"{world} ranks do not divide by policy.megatron_cfg.tensor_model_parallel_size "
            f"{parallel.tensor} x pipeline_model_parallel_size {parallel.pipeline}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def stop() -> None:
    """Leaves the job. Under torchrun a process joins once: its store keeps the old addresses."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    cpu.uninstall()


def _join(timeout: timedelta) -> None:
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group(cpu.backend(), timeout=timeout)
        return
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group(
        cpu.backend(), store=store, rank=0, world_size=1, timeout=timeout
    )


def is_first_rank() -> bool:
    """The one rank that reads Kafka and writes what is written once."""
    return distributed.get_rank() == 0


def data_parallel_rank() -> int:
    return int(parallel_state.get_data_parallel_rank())


def data_parallel_size() -> int:
    return int(parallel_state.get_data_parallel_world_size())
