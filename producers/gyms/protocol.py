"""What a gym is: it runs the G rollouts of one prompt group and gives each as it completes."""

import importlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from producers.generation.generation import Generation
from producers.generation.policy_model import PolicyModel
from schemas.errors import ConfigError
from schemas.records import SampledSpan, Trace
from schemas.vectors import logprob_bytes, token_bytes

Timing = dict[str, float]


@dataclass(frozen=True)
class RolloutRequest:
    """One attempt of one prompt group."""

    task_index: int
    attempt: int
    agent: str
    rows: list[dict[str, Any]]
    """G dataset rows in NeMo Gym's format, in input order"""
    rollout_ids: list[str]
    """G, unique in the run: prefix every model call id with one"""
    deadline_s: float
    """Seconds that the whole attempt may take"""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """What the verifier and the model calls of one rollout gave."""

    reward: float
    traces: list[Trace]
    version_start: int
    """Policy version when the rollout began"""
    reward_components: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    truncated: bool = False
    failure_class: str | None = None
    turn_count: int = 1
    full_result: dict[str, Any] = field(default_factory=dict)
    """For logging, JSON-able: the row, the output and what else the gym wants to show"""


class Gym(Protocol):
    """Built as `Class(agents, model, settings)`: settings is a dict for each agent, by name."""

    agents: tuple[str, ...]

    def run(self, group: RolloutRequest) -> AsyncIterator[tuple[int, RolloutResult, Timing | None]]:
        """Yields (row index, result, None) in completion order, and timing with the last row only:
        seconds by name.

        Every wait inside ends within group.deadline_s. A row that fails raises: its attempt fails
        and no other group does. Closing the iterator early ends what still runs.
        """
        ...


class GymClass(Protocol):
    def __call__(
        self, agents: tuple[str, ...], model: PolicyModel, settings: dict[str, dict[str, Any]]
    ) -> Gym: ...


def load_gym(path: str) -> GymClass:
    """The class that `module:Class` names. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"gym {path!r}: {error}; give it as package.module:Class, with its directory on "
            "PYTHONPATH"
        ) from error
    if not callable(getattr(found, "run", None)):
        raise ConfigError(f"gym {path!r} has no run(group); see producers/gyms/protocol.py")
    return cast(GymClass, found)


def single_turn(
    generation: Generation,
    reward: float,
    *,
    full_result: dict[str, Any] | None = None,
    reward_components: dict[str, float] | None = None,
) -> RolloutResult:
    """The result of a rollout that is one model call; "length" makes it truncated."""
    return RolloutResult(
        reward=reward,
        reward_components=reward_components or {},
        traces=[trace_of(generation)],
        truncated=generation.finish_reason == "length",
        version_start=generation.version_start,
        full_result=full_result or {},
    )


def trace_of(generation: Generation) -> Trace:
    """Prompt and sampled tokens of one model call; log-probabilities are 0.0 over the prompt."""
    prompt_length = len(generation.prompt_token_ids)
    return Trace(
        trace_id=generation.request_id,
        model_call_ids=[generation.request_id],
        token_ids=token_bytes([*generation.prompt_token_ids, *generation.token_ids.tolist()]),
        generation_logprobs=logprob_bytes([0.0] * prompt_length)
        + logprob_bytes(generation.logprobs),
        sampled_spans=[
            SampledSpan(
                model_call_id=generation.request_id,
                start=prompt_length,
                end=prompt_length + len(generation.token_ids),
                version_start=generation.version_start,
                version_end=generation.version_end,
            )
        ],
    )
