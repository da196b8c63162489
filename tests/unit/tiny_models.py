"""Small random Hugging Face models for the trainer's tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from schemas.config import PolicyConfig

VOCAB = 67  # odd: two tensor-parallel ranks must pad it
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}


def make_qwen2(directory: Path, **changes: Any) -> Path:
    return _save(Qwen2ForCausalLM, Qwen2Config(**SIZES | changes), directory)


def make_llama(directory: Path, **changes: Any) -> Path:
    return _save(LlamaForCausalLM, LlamaConfig(**SIZES | changes), directory)


def _save(model_class: Any, config: Any, directory: Path) -> Path:
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():  # fresh biases are 0 and norms 1: nothing would notice a swap
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def policy_config(directory: Path, *, micro_batch: int = 4, **more: Any) -> PolicyConfig:
    values: dict[str, Any] = {
        "model_name": str(directory),
        "train_micro_batch_size": micro_batch,
        "precision": "float32",
        "megatron_cfg": {"optimizer": {"lr": 1e-3, "min_lr": 0.0}},
    }
    return PolicyConfig.model_validate(values | more)
