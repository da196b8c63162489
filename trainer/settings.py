"""What the trainer's parts take from the configuration and from the model's directory."""

import json
from pathlib import Path
from typing import Any

from schemas.config import Config, MegatronConfig
from schemas.errors import ConfigError
from trainer.parallel import ModelParallel

# where Hugging Face models name their padding token, the most specific file first
_TOKEN_FILES = ("generation_config.json", "config.json")


def model_parallel(megatron: MegatronConfig) -> ModelParallel:
    return ModelParallel(
        tensor=megatron.tensor_model_parallel_size, pipeline=megatron.pipeline_model_parallel_size
    )


def require_ranks(config: Config, ranks: int) -> None:
    """Raises ConfigError where the job has another number of ranks than the configuration."""
    megatron = config.policy.megatron_cfg
    sizes = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.data_parallel_size,
    )
    needed = sizes[0] * sizes[1] * sizes[2]
    if ranks != needed:
        raise ConfigError(
            f"policy.megatron_cfg asks for tensor {sizes[0]} x pipeline {sizes[1]} x data "
            f"{sizes[2]} = {needed} ranks, and {ranks} started: use torchrun --nproc-per-node "
            f"{needed}, or change the sizes"
        )


def pad_token_id(model_directory: Path) -> int:
    """The padding token, else the end-of-sequence token, else 0: no loss ever sees it."""
    for key in ("pad_token_id", "eos_token_id"):
        for name in _TOKEN_FILES:
            found = _value(model_directory / name, key)
            token = found[0] if isinstance(found, list) and found else found
            if isinstance(token, int) and token >= 0:
                return token
    return 0


def _value(path: Path, key: str) -> Any:
    return json.loads(path.read_text(encoding="utf-8")).get(key) if path.exists() else None
