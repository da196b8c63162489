"""What a teacher is asked, and how it fails."""

from typing import Protocol

import numpy as np

from schemas.vectors import LOGPROB_DTYPE


class TeacherFailed(Exception):
    """`may_pass`: another try could succeed. The message names what was asked and what came."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Teacher(Protocol):
    """Called from one thread at a time."""

    def start(self) -> None:
        """Blocks until it can answer; an endpoint always can. Raises ConfigError."""

    def logprobs(self, sequences: list[bytes]) -> list[bytes]:
        """[tokens] little-endian float32 for each of [tokens] int32.

        Element i is log p(token i | tokens before it) at temperature 1; the first is 0, for
        nothing is before it. Raises TeacherFailed within the teacher's deadline.
        """

    def close(self) -> None:
        """Ends what it started; from any thread, also while logprobs() waits."""


def as_bytes(logprobs: list[float | None], tokens: int) -> bytes:
    """Raises TeacherFailed where these are not `tokens` finite numbers after a None or 0."""
    if len(logprobs) != tokens:
        raise TeacherFailed(
            f"{len(logprobs)} log-probabilities came for {tokens} tokens", may_pass=False
        )
    values = np.zeros(tokens, dtype=LOGPROB_DTYPE)
    values[1:] = logprobs[1:]  # None becomes nan
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise TeacherFailed(
            f"the log-probability of token {at} of {tokens} is {values[at]}", may_pass=False
        )
    return values.tobytes()
