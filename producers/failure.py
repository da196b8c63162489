"""Why an attempt failed, as AttemptFailed says it. Pure."""

from producers.generation.generation import GenerationFailed
from producers.gym_stream import AttemptOverdue, GymCancelled
from schemas.errors import DatasetError, RecordTooLarge, RowRejected


class GymMisbehaved(Exception):
    """A gym broke its protocol: the same prompt would fail again."""

    failure_class = "data"


EXPECTED = (
    AttemptOverdue,
    DatasetError,
    GenerationFailed,
    GymCancelled,
    GymMisbehaved,
    RecordTooLarge,
    RowRejected,
)
"""Errors whose message is enough; all others are named by class and logged with a traceback"""


def failure_of(error: BaseException) -> tuple[str, str]:
    """Reason and class. "infra": another attempt may succeed; "data": the prompt would fail again.

    A gym's own error may say its class in an attribute `failure_class`.
    """
    match error:
        case AttemptOverdue():
            return "deadline", "infra"
        case RecordTooLarge():
            return "too_large", "data"
        case RowRejected():
            return f"row_rejected/{error.reason}", "data"
        case DatasetError():
            return "bad_prompt", "data"
        case GymMisbehaved():
            return "gym_protocol", "data"
        case _:
            declared = getattr(error, "failure_class", None)
            return "gym_error", "data" if declared == "data" else "infra"


def described(error: BaseException) -> str:
    return str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
