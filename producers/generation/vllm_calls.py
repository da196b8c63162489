"""What is asked of vLLM and what is read from its answer.

Only the engine thread imports this file, so that everything else works without vLLM.
"""

import numpy as np
import torch
from vllm import RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from producers.generation.generation import (
    EngineSettings,
    Generation,
    GenerationFailed,
    Request,
    VersionSpan,
    check_logprobs,
)


def build_engine(model_dir: str, settings: EngineSettings) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model_dir,
            skip_tokenizer_init=True,  # token ids in, token ids out
            dtype=settings.precision,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            seed=settings.seed,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enforce_eager=settings.enforce_eager,
            logprobs_mode="processed_logprobs",  # of what was sampled from, temperature included
            generation_config="vllm",  # no sampling default from the model's directory
            async_scheduling=False,  # else a step in flight would end under weights it did not use
            disable_log_stats=True,
        )
    )


def load_weights(engine: LLMEngine, weights_dir: str, version: str, recompute_kv: bool) -> None:
    """The safetensors of `weights_dir` in place of the loaded weights, labelled `version`."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": weights_dir})
    engine.collective_rpc("apply_model", args=(_renew_packed_heads,))
    if recompute_kv:
        engine.reset_prefix_cache(reset_running_requests=True)
    engine.set_weight_version(version)


def _renew_packed_heads(model: torch.nn.Module) -> None:
    """On a CPU vLLM computes logits from a packed copy of the output layer, and its reload leaves
    that copy as it was where the layer is tied to the embedding (seen in 0.32: logprobs off by 3).
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            method = layer.quant_method
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)


def sampling_params(request: Request) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        logprobs=0,  # the sampled token's own
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generation(request: Request, version_start: int, output: RequestOutput) -> Generation:
    """Raises GenerationFailed where vLLM gave no usable tokens."""
    completion = output.outputs[0]
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    finish_reason = completion.finish_reason
    if finish_reason not in ("stop", "length") or not completion.weight_versions:
        raise GenerationFailed(
            "infra",
            f"request {request.request_id}: vLLM ended it with {finish_reason!r} after "
            f"{len(token_ids)} tokens",
        )
    sampled = zip(completion.logprobs or (), completion.token_ids, strict=True)
    logprobs = np.asarray([at[token].logprob for at, token in sampled], dtype=np.float32)
    versions = [
        VersionSpan(span.start, span.end, int(span.version)) for span in completion.weight_versions
    ]
    check_logprobs(request.request_id, token_ids, logprobs, versions[-1].version)
    return Generation(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason="stop" if finish_reason == "stop" else "length",
        version_start=version_start,
        version_end=versions[-1].version,
        versions=versions,
    )
