"""What a model call is asked and gives: tokens, log-probabilities and their policy versions."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from schemas.errors import GroupstreamError

FailureClass = Literal["infra", "data"]


class GenerationFailed(GroupstreamError):
    """A model call that gave nothing to train on.

    `failure_class` is "infra" where another attempt may succeed (engine stopped, deadline passed)
    and "data" where the same prompt would fail again.
    """

    def __init__(self, failure_class: FailureClass, message: str) -> None:
        super().__init__(message)
        self.failure_class = failure_class


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is built; the names are those of `policy.generation.vllm_cfg`."""

    max_model_len: int
    precision: str = "auto"
    seed: int = 0
    max_num_seqs: int = 128
    kv_cache_gib: int = 1
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = True


@dataclass(frozen=True)
class Request:
    """One model call, as it is asked for."""

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: list[int]
    temperature: float
    top_p: float
    seed: int | None


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a generation, sampled under one policy version."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, eq=False)
class Generation:
    """One model call as the engine sampled it; the stop token is part of it.

    version_start is the policy version when the engine took the request, version_end that of the
    last token. They differ where weights changed in flight, and `versions` says at which token.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: NDArray[np.int32]
    """[tokens]"""
    logprobs: NDArray[np.float32]
    """[tokens], of the distribution that was sampled from; all finite"""
    finish_reason: Literal["stop", "length"]
    version_start: int
    version_end: int
    versions: list[VersionSpan]
    """Ascending, covers [0, tokens)"""


def check_logprobs(
    request_id: str, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
) -> None:
    """Raises GenerationFailed for the first NaN or infinite log-probability."""
    finite = np.isfinite(logprobs)
    if not finite.all():
        at = int(np.argmin(finite))
        raise GenerationFailed(
            "data",
            f"request {request_id}: the logprob of token {int(token_ids[at])} at position {at} of "
            f"{len(logprobs)} is {logprobs[at]}, under policy version {version}; the weights of "
            "that version most likely hold NaN or infinite values",
        )
