"""A megatron-core GPTModel with the shapes of an `Architecture`, in the local layer spec."""

import torch
import torch.nn.functional as F  # noqa: N812 torch's own name for it
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from schemas.errors import ConfigError
from trainer.architecture import Architecture


def build_model(architecture: Architecture, dtype: torch.dtype) -> GPTModel:
    """This rank's part of the model, on the CPU, with weights that must still be loaded.

    Raises ConfigError where heads or layers do not divide by the parallel sizes.
    """
    config = transformer_config(architecture, dtype)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded_vocab_size(architecture.vocab_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        rope_scaling=architecture.llama3_rope_factor is not None,
        rope_scaling_factor=architecture.llama3_rope_factor or 1.0,
    )
    _mark_split_weights(model)
    return model


def _mark_split_weights(model: GPTModel) -> None:
    # Megatron marks them while it initialises them, which we skip. Unmarked, a split weight counts
    # as a copy: the gradient norm would leave out every rank's share but the first.
    split = ((ColumnParallelLinear, 0), (VocabParallelEmbedding, 0), (RowParallelLinear, 1))
    for module in model.modules():
        for kind, dimension in split:
            weight = module.weight if isinstance(module, kind) else None
            if weight is not None and not getattr(weight, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(weight, True, dimension, 1)


def transformer_config(architecture: Architecture, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the model; no fused kernels, so every device computes it."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    for name, count in (
        ("num_attention_heads", architecture.num_attention_heads),
        ("num_key_value_heads", architecture.num_query_groups),
        ("intermediate_size", architecture.ffn_hidden_size),
    ):
        if count % tensor:
            raise ConfigError(
                f"{name} {count} does not divide by tensor_model_parallel_size {tensor}"
            )
    if architecture.num_layers % pipeline:
        raise ConfigError(
            f"num_hidden_layers {architecture.num_layers} does not divide by "
            f"pipeline_model_parallel_size {pipeline}"
        )
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.layernorm_epsilon,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,  # every weight is loaded: see trainer/weights.py
        use_cpu_initialization=True,
        calculate_per_token_loss=True,  # gradients add up; our loss carries its own denominator
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def padded_vocab_size(vocab_size: int) -> int:
    """Split evenly over the tensor-parallel ranks; what is added is never a token."""
    tensor = int(parallel_state.get_tensor_model_parallel_world_size())
    return -(-vocab_size // tensor) * tensor
