"""Everything that a restarted trainer needs to go on with the same bits.

A checkpoint is a directory: megatron's distributed checkpoint (model, optimizer, schedule), one
file of random states a rank, and `progress.json`, readable without torch. It is written under a
temporary name that carries the writer's token and renamed when complete.
"""

import json
import queue
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from schemas.errors import ConfigError
from trainer import cpu
from trainer.atomic_directory import partial_path, publish, refuse_existing
from trainer.megatron import Policy
from trainer.optimizer import load_optimizer
from trainer.parallel import is_first_rank

FORMAT = 1
PROGRESS_NAME = "progress.json"
# the layout of the distributed optimizer that both supported megatron versions save and load
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


@dataclass(frozen=True)
class Progress:
    """Where the run stood when the checkpoint was taken."""

    step: int
    """Optimizer steps done: the policy version of the weights."""
    offsets: dict[int, int]
    """Partition of `groups` -> lowest offset of a group not yet trained, else the position."""
    next_task_index: int


def save(policy: Policy, target: Path, token: str, progress: Progress) -> None:
    """Writes the directory `target`. Collective.

    Raises FileExistsError on every rank if `target` exists.
    """
    refuse_existing(target)
    partial = partial_path(target, token)
    if is_first_rank():
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier life with the same token
        partial.mkdir(parents=True)
    distributed.barrier()
    _answer_in_process()
    dist_checkpointing.save(
        _sharded_state(policy, is_loading=False), str(partial), content_metadata=dict(_METADATA)
    )
    save_file(_random_states(), partial / _random_name())
    distributed.barrier()
    if is_first_rank():
        document = {"format": FORMAT, "ranks": distributed.get_world_size(), **asdict(progress)}
        (partial / PROGRESS_NAME).write_text(json.dumps(document), encoding="utf-8")
        publish(partial, target)
    distributed.barrier()


def restore(policy: Policy, directory: Path) -> Progress:
    """Sets model, optimizer, schedule and random states; a policy built from the same config.

    Collective. Raises ConfigError for a directory that is no complete checkpoint, or one that was
    written by another number of ranks.
    """
    progress = read_progress(directory)
    loaded = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(directory))
    policy.model.load_state_dict(loaded["model"])
    load_optimizer(policy.optimizer, loaded["optimizer"])
    policy.schedule.num_steps = 0  # megatron advances by the loaded count instead of setting it
    policy.schedule.load_state_dict(loaded["schedule"])
    path = directory / _random_name()
    if not path.exists():
        raise ConfigError(
            f"{directory} has no {path.name}: it was written by another number of ranks than "
            f"{distributed.get_world_size()}; start with as many"
        )
    _set_random_states(load_file(path))
    return progress


def read_progress(directory: Path) -> Progress:
    """Raises ConfigError where `directory` is no complete checkpoint of this format."""
    path = directory / PROGRESS_NAME
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ConfigError(f"{path} has format {document['format']}, we read {FORMAT}")
        return Progress(
            step=document["step"],
            offsets={int(p): offset for p, offset in document["offsets"].items()},
            next_task_index=document["next_task_index"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} is no complete checkpoint: {error!r}") from error


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    model = policy.model.sharded_state_dict(metadata=dict(_METADATA))
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=dict(_METADATA)
        ),
        "schedule": policy.schedule.state_dict(),
    }


def _answer_in_process() -> None:
    # We save synchronously, where a plain queue serves. Megatron's default is the queue of a
    # spawned process, which imports the main module once more: 27 s at the first checkpoint.
    writer: Any = filesystem_async
    if writer._results_queue is None:
        writer._results_queue = queue.Queue()


def _random_name() -> str:
    return f"random-{distributed.get_rank():05d}.safetensors"


def _random_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if cpu.device().type == "cuda":
        states["device"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {f"tracker.{name}": state.clone() for name, state in tracked.items()}


def _set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
    prefix = "tracker."
    get_cuda_rng_tracker().set_states(
        {name[len(prefix) :]: state for name, state in states.items() if name.startswith(prefix)}
    )
