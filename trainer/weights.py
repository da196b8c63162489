"""Hugging Face safetensors directory <-> this rank's megatron parameters.

`load_weights` cuts each tensor to the rank's share. `export_weights` gathers the shares over the
tensor-parallel ranks and writes one file a pipeline stage, so a stage's weights never travel;
all ranks must see the same file system. A round trip keeps every bit where the dtypes agree.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from schemas.errors import ConfigError
from trainer.architecture import Architecture
from trainer.atomic_directory import partial_path, publish, refuse_existing
from trainer.parallel import data_parallel_rank, is_first_rank

Split = Literal["whole", "columns", "qkv", "gate_up", "vocab"]
INDEX_NAME = "model.safetensors.index.json"
# what vLLM and transformers read beside the weights: configuration, tokenizer, chat template
_COPIED_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken"})


@dataclass(frozen=True)
class Placement:
    """How one megatron parameter is made of Hugging Face tensors and split over ranks."""

    split: Split
    hf_names: tuple[str, ...]


def stage_placements(
    architecture: Architecture, layers: range, *, first: bool, last: bool
) -> dict[str, Placement]:
    """Placements by megatron name, for the pipeline stage that computes the global `layers`."""
    placements: dict[str, Placement] = {}
    if first:
        placements["embedding.word_embeddings.weight"] = Placement(
            "vocab", ("model.embed_tokens.weight",)
        )
    for local, layer in enumerate(layers):
        placements |= _layer_placements(architecture, local, layer)
    if last:
        placements["decoder.final_layernorm.weight"] = Placement("whole", ("model.norm.weight",))
        if not architecture.tied_embeddings:
            placements["output_layer.weight"] = Placement("vocab", ("lm_head.weight",))
        elif not first:  # this stage's own copy of the embedding
            placements["output_layer.weight"] = Placement("vocab", ("model.embed_tokens.weight",))
    return placements


def _layer_placements(architecture: Architecture, local: int, layer: int) -> dict[str, Placement]:
    ours, theirs = f"decoder.layers.{local}", f"model.layers.{layer}"
    attention = f"{theirs}.self_attn"
    placements = {
        f"{ours}.input_layernorm.weight": Placement("whole", (f"{theirs}.input_layernorm.weight",)),
        f"{ours}.self_attention.linear_qkv.weight": Placement(
            "qkv", tuple(f"{attention}.{part}_proj.weight" for part in "qkv")
        ),
        f"{ours}.self_attention.linear_proj.weight": Placement(
            "columns", (f"{attention}.o_proj.weight",)
        ),
        f"{ours}.pre_mlp_layernorm.weight": Placement(
            "whole", (f"{theirs}.post_attention_layernorm.weight",)
        ),
        f"{ours}.mlp.linear_fc1.weight": Placement(
            "gate_up", (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        ),
        f"{ours}.mlp.linear_fc2.weight": Placement("columns", (f"{theirs}.mlp.down_proj.weight",)),
    }
    if architecture.qkv_bias:
        placements[f"{ours}.self_attention.linear_qkv.bias"] = Placement(
            "qkv", tuple(f"{attention}.{part}_proj.bias" for part in "qkv")
        )
    return placements


def to_shard(
    split: Split, tensors: Sequence[Tensor], architecture: Architecture, rank: int, ranks: int
) -> Tensor:
    """The share of tensor-parallel `rank` in the parameter made of the whole HF `tensors`."""
    if split == "whole":
        return tensors[0]
    if split == "columns":
        return tensors[0].chunk(ranks, dim=1)[rank]
    if split == "gate_up":
        return torch.cat([tensor.chunk(ranks, dim=0)[rank] for tensor in tensors])
    if split == "vocab":
        missing = -tensors[0].shape[0] % ranks
        padded = torch.cat([tensors[0], tensors[0].new_zeros(missing, tensors[0].shape[1])])
        return padded.chunk(ranks, dim=0)[rank]
    # qkv: each query group holds its queries, then its key, then its value
    by_group = [
        tensor.view(architecture.num_query_groups, -1, architecture.head_dim, *tensor.shape[1:])
        for tensor in tensors
    ]
    groups = torch.cat(by_group, dim=1).chunk(ranks, dim=0)[rank]
    return groups.reshape(-1, *tensors[0].shape[1:])


def to_hf(split: Split, shards: Sequence[Tensor], architecture: Architecture) -> list[Tensor]:
    """The whole HF tensors of a parameter from the shares of all ranks: inverse of `to_shard`."""
    if split == "whole":
        return [shards[0]]
    if split == "columns":
        return [torch.cat(list(shards), dim=1)]
    if split == "vocab":
        return [torch.cat(list(shards))[: architecture.vocab_size]]
    if split == "gate_up":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([pair[half] for pair in halves]) for half in (0, 1)]
    whole = torch.cat(list(shards))
    per_group = architecture.num_attention_heads // architecture.num_query_groups
    groups = whole.view(
        architecture.num_query_groups, per_group + 2, architecture.head_dim, *whole.shape[1:]
    )
    parts = torch.split(groups, [per_group, 1, 1], dim=1)
    return [part.reshape(-1, *whole.shape[1:]) for part in parts]


def load_weights(model: nn.Module, architecture: Architecture, directory: Path) -> None:
    """Fills every parameter of this rank's GPTModel from `directory`, cast to its dtype.

    Raises ConfigError for a tensor that is missing or has another shape.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    placements = _this_stage(architecture)
    parameters = dict(model.named_parameters())
    if parameters.keys() != placements.keys():
        raise RuntimeError(
            f"megatron parameters without a placement, or the reverse: "
            f"{sorted(parameters.keys() ^ placements.keys())}"
        )
    with ExitStack() as stack, torch.no_grad():
        reader = _Reader(directory, stack)
        for name, parameter in parameters.items():
            placement = placements[name]
            tensors = [reader.tensor(hf_name) for hf_name in placement.hf_names]
            _check_rows(placement, tensors, architecture, directory)
            shard = to_shard(placement.split, tensors, architecture, rank, ranks)
            if shard.shape != parameter.shape:
                raise ConfigError(
                    f"{directory}: {', '.join(placement.hf_names)} give {tuple(shard.shape)}, "
                    f"config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)


def _check_rows(
    placement: Placement, tensors: Sequence[Tensor], architecture: Architecture, directory: Path
) -> None:
    # padding would hide a vocabulary of another size
    if placement.split == "vocab" and tensors[0].shape[0] != architecture.vocab_size:
        raise ConfigError(
            f"{directory}: {placement.hf_names[0]} has {tensors[0].shape[0]} rows, config.json "
            f"says vocab_size {architecture.vocab_size}"
        )


class _Reader:
    """Finds tensors by name in one or several safetensors files."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{directory} has no *.safetensors file: save the model as such")
        self._directory = directory
        self._by_name: dict[str, Any] = {}
        for path in files:
            opened = stack.enter_context(safe_open(path, framework="pt"))
            self._by_name |= dict.fromkeys(opened.keys(), opened)

    def tensor(self, name: str) -> Tensor:
        if name not in self._by_name:
            raise ConfigError(f"{self._directory}: no tensor {name} in its safetensors files")
        tensor: Tensor = self._by_name[name].get_tensor(name)
        return tensor


def export_weights(
    model: nn.Module, architecture: Architecture, source: Path, target: Path, token: str
) -> None:
    """Writes `target`, a complete HF directory with the files of `source` beside the weights.

    Collective: every rank calls it. Raises FileExistsError on every rank if `target` exists.
    """
    refuse_existing(target)
    partial = partial_path(target, token)
    if is_first_rank():
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier life with the same token
        partial.mkdir(parents=True)
        _copy_companions(source, partial)
    distributed.barrier()
    tensors = dict(_gathered(model, architecture))
    if data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
        save_file(tensors, partial / _stage_file(), metadata={"format": "pt"})
    distributed.barrier()
    if is_first_rank():
        _write_index(partial)
        publish(partial, target)
    distributed.barrier()


def _this_stage(architecture: Architecture) -> dict[str, Placement]:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    per_stage = architecture.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
    return stage_placements(
        architecture,
        range(stage * per_stage, (stage + 1) * per_stage),
        first=parallel_state.is_pipeline_first_stage(),
        last=parallel_state.is_pipeline_last_stage(),
    )


def _gathered(model: nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """HF name and whole tensor, on the CPU, of everything that this stage owns."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    placements = _this_stage(architecture)
    copies_embedding = not parallel_state.is_pipeline_first_stage()
    for name, parameter in model.named_parameters():
        placement = placements[name]
        if copies_embedding and placement.hf_names == ("model.embed_tokens.weight",):
            continue  # the first stage exports it
        mine = parameter.detach().contiguous()
        shards = [mine]
        if ranks > 1:
            shards = [torch.empty_like(mine) for _ in range(ranks)]
            distributed.all_gather(shards, mine, group=group)
        whole = to_hf(placement.split, shards, architecture)
        for hf_name, tensor in zip(placement.hf_names, whole, strict=True):
            yield hf_name, tensor.cpu().contiguous().clone()


def _stage_file() -> str:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return "model.safetensors"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _write_index(directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return
    weight_map: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), path.name)
    total = sum(path.stat().st_size for path in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _copy_companions(source: Path, directory: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.suffix in _COPIED_SUFFIXES and path.is_file() and path.name != INDEX_NAME:
            shutil.copyfile(path, directory / path.name)
