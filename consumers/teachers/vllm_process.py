"""A teacher's own process: vLLM around one model directory, asked through its standard input.

`python -m consumers.teachers.vllm_process SETTINGS`, SETTINGS the JSON of VllmSettings. It ends
with the assembler, whatever it does at that moment. What vLLM prints goes to standard error.
"""

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from consumers.teachers.frames import PipeClosed, read_frame, write_frame
from schemas.vectors import tokens
from schemas.vllm_environment import prepare_environment

if TYPE_CHECKING:
    from vllm import LLM

LOOK_S = 1.0


class VllmSettings(msgspec.Struct, frozen=True):
    """`max_tokens`: the longest sequence that is asked for."""

    model_dir: str
    max_tokens: int
    precision: str
    tensor_parallel_size: int
    gpu_memory_utilization: float
    enforce_eager: bool
    max_num_seqs: int
    kv_cache_gib: int


class Answered(msgspec.Struct, frozen=True):
    """One list a sequence; None where vLLM gave none, as for the first token."""

    logprobs: list[list[float | None]]
    error: str = ""


def main(settings_json: str) -> None:
    # The pipe moves to a number of its own: whatever prints would be read as an answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    settings = msgspec.json.decode(settings_json, type=VllmSettings)
    model = _load(settings)
    write_frame(answers, Answered([]))
    while True:
        try:
            sequences: list[bytes] = read_frame(0)
        except PipeClosed:
            return
        write_frame(answers, _answer(model, sequences))


def _end_with(parent: int) -> None:
    """While it loads or computes nobody reads its input, whose end would tell."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _load(settings: VllmSettings) -> "LLM":
    # A prompt that fills the context still needs room for the token that vLLM must sample.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    prepare_environment(settings.kv_cache_gib)
    from vllm import LLM  # noqa: PLC0415 - reads the environment

    return LLM(
        model=settings.model_dir,
        skip_tokenizer_init=True,
        dtype=settings.precision,
        max_model_len=settings.max_tokens + 1,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        generation_config="vllm",
    )


def _answer(model: "LLM", sequences: list[bytes]) -> Answered:
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415

    prompts = [TokensPrompt(prompt_token_ids=tokens(sequence).tolist()) for sequence in sequences]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    try:
        outputs = model.generate(prompts, params, use_tqdm=False)
    except ValueError as error:  # a sequence that it refuses; another one may be right
        return Answered([], f"{type(error).__name__}: {error}")
    return Answered([_own(output.prompt_token_ids, output.prompt_logprobs) for output in outputs])


def _own(token_ids: Any, logprobs: Any) -> list[float | None]:
    pairs = zip(token_ids, logprobs, strict=True)
    return [None if at is None else float(at[token].logprob) for token, at in pairs]


if __name__ == "__main__":
    main(*sys.argv[1:])
