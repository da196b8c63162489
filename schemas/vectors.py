"""Token ids and log-probabilities: bytes on the wire, numpy arrays in memory, no copy between."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")


def token_bytes(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    return np.asarray(token_ids, dtype=TOKEN_DTYPE).tobytes()


def logprob_bytes(logprobs: Sequence[float] | NDArray[Any]) -> bytes:
    return np.asarray(logprobs, dtype=LOGPROB_DTYPE).tobytes()


def tokens(payload: bytes) -> NDArray[np.int32]:
    """[tokens] int32, a read-only view of `payload`. Raises ValueError for a broken length."""
    return np.frombuffer(payload, dtype=TOKEN_DTYPE)


def logprobs(payload: bytes) -> NDArray[np.float32]:
    """[tokens] float32, a read-only view of `payload`. Raises ValueError for a broken length."""
    return np.frombuffer(payload, dtype=LOGPROB_DTYPE)
