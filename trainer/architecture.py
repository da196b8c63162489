"""What a Hugging Face `config.json` says about a Llama or Qwen2 model. Pure: no torch.

Everything that would silently compute something else is refused with the key and its value.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

# rope_type llama3: the values that megatron-core computes with; only `factor` is free
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Architecture:
    """Shapes and switches of one decoder-only model with RMSNorm, SwiGLU, GQA and RoPE."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: float
    llama3_rope_factor: float | None
    qkv_bias: bool
    tied_embeddings: bool


def read_architecture(directory: Path) -> Architecture:
    """Raises ConfigError for a missing file or a model that the trainer does not compute."""
    path = directory / "config.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.model_name: cannot read {path}: {error}") from error
    _refuse_unsupported(values, path)
    heads = int(values["num_attention_heads"])
    base, factor = _rope(values, path)
    return Architecture(
        model_type=values["model_type"],
        num_layers=int(values["num_hidden_layers"]),
        hidden_size=int(values["hidden_size"]),
        ffn_hidden_size=int(values["intermediate_size"]),
        num_attention_heads=heads,
        num_query_groups=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
        vocab_size=int(values["vocab_size"]),
        max_position_embeddings=int(values["max_position_embeddings"]),
        layernorm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        rotary_base=base,
        llama3_rope_factor=factor,
        qkv_bias=values["model_type"] == "qwen2",
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(values: dict[str, Any], path: Path) -> None:
    if values.get("model_type") not in ("llama", "qwen2"):
        raise ConfigError(
            f"{path}: model_type is {values.get('model_type')!r}, the trainer computes llama and "
            "qwen2"
        )
    required = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    required |= {"use_sliding_window": False, "attention_dropout": 0.0, "pretraining_tp": 1}
    for key, expected in required.items():
        found = values.get(key, expected)
        if found != expected:
            raise ConfigError(f"{path}: {key} is {found!r}, the trainer computes {expected!r} only")


def _rope(values: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """Base and llama3 factor; transformers 5 writes `rope_parameters`, 4 wrote `rope_theta`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor must be 1.0")
    if kind == "default":
        return base, None
    fixed = {key: parameters.get(key, value) for key, value in _LLAMA3_ROPE.items()}
    if kind != "llama3" or fixed != _LLAMA3_ROPE:
        raise ConfigError(
            f"{path}: RoPE scaling {parameters} is not computed; default and llama3 with "
            f"{_LLAMA3_ROPE} are"
        )
    return base, float(parameters["factor"])
