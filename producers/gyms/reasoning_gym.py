"""One-turn tasks of the reasoning-gym package: a question, an answer, its family's verifier."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import reasoning_gym
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from reasoning_gym.factory import DATASETS

from producers.generation.generation import GenerationFailed
from producers.generation.policy_model import PolicyModel
from producers.generation.tokens import messages_of
from producers.gyms.protocol import RolloutRequest, RolloutResult, Timing, single_turn
from producers.gyms.rollouts import run_rows
from schemas.errors import ConfigError, DatasetError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class FamilySettings(BaseModel):
    """`env.agents.<name>.settings` of an agent of this gym."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: str = Field(description="A task family of reasoning-gym, such as chain_sum.")
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="The family's own parameters, for new problems."
    )
    prompt: str = Field(
        "{question}", description="Text of a new row; also takes the problem's metadata by name."
    )
    answer: Literal["last_number", "after_marker", "answer_tag", "whole"] = Field(
        "last_number", description="Which part of the generated text is the answer."
    )
    marker: str = Field("Answer:", description="For after_marker: the last one counts.")
    exact: bool = Field(
        False, description="True: reward 1 for a full score, else 0; False: the verifier's score."
    )


def family_settings(agent: str, settings: dict[str, Any]) -> FamilySettings:
    """Raises ConfigError, which names the agent and the key."""
    try:
        parsed = FamilySettings.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"env.agents.{agent}.settings: {problems}") from error
    if parsed.family not in DATASETS:
        near = sorted(name for name in DATASETS if parsed.family.split("_")[0] in name)
        raise ConfigError(
            f"env.agents.{agent}.settings.family: reasoning-gym has no {parsed.family!r}; near "
            f"ones: {near}, all {len(DATASETS)}: reasoning_gym.factory.DATASETS"
        )
    return parsed


def extract_answer(text: str, settings: FamilySettings) -> str | None:
    """The answer inside a generated text, None where there is none.

    >>> extract_answer("3 + 4 is 7.", FamilySettings(family="chain_sum"))
    '7'
    """
    match settings.answer:
        case "last_number":
            numbers = _NUMBER.findall(text)
            return numbers[-1] if numbers else None
        case "after_marker":
            _, marker, answer = text.rpartition(settings.marker)
            return answer.strip() if marker else None
        case "answer_tag":
            tagged: str | None = reasoning_gym.utils.extract_answer(text)
            return tagged
        case "whole":
            return text.strip()


class ReasoningGym:
    """Agents = task families. Rows carry `question`, `answer` and reasoning-gym's `metadata`."""

    def __init__(
        self, agents: tuple[str, ...], model: PolicyModel, settings: dict[str, dict[str, Any]]
    ) -> None:
        self.agents = agents
        self._model = model
        self._settings = {agent: family_settings(agent, settings[agent]) for agent in agents}
        self._verifiers: dict[str, Callable[..., float]] = {
            agent: reasoning_gym.get_score_answer_fn(self._settings[agent].family)
            for agent in agents
        }

    def run(self, group: RolloutRequest) -> AsyncIterator[tuple[int, RolloutResult, Timing | None]]:
        return run_rows(group, self._rollout)

    async def _rollout(self, group: RolloutRequest, row_index: int) -> RolloutResult:
        ends_s = time.monotonic() + group.deadline_s
        row, rollout_id = group.rows[row_index], group.rollout_ids[row_index]
        entry = _entry(row, self._settings[group.agent].family, rollout_id)
        generation = await self._model.sample(
            self._model.tokens.prompt_ids(messages_of(row)),
            model_call_id=f"{rollout_id}/1",
            max_new_tokens=row["responses_create_params"].get("max_output_tokens"),
            deadline_s=group.deadline_s,
        )
        text = self._model.tokens.text(generation.token_ids)
        answer = extract_answer(text, self._settings[group.agent])
        try:
            # In a thread: some families search for seconds, and the event loop must go on.
            score = asyncio.to_thread(self._verifiers[group.agent], answer=answer, entry=entry)
            reward = await asyncio.wait_for(score, max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            raise GenerationFailed(
                "infra", f"rollout {rollout_id}: the verifier did not end in time"
            ) from None
        if self._settings[group.agent].exact:
            reward = float(reward == 1.0)
        shown = {**row, "output": text, "answer_given": answer, "reward": reward}
        return single_turn(generation, float(reward), full_result=shown)


def _entry(row: dict[str, Any], family: str, rollout_id: str) -> dict[str, Any]:
    """What the family's verifier is given. Raises DatasetError."""
    missing = [key for key in ("question", "answer", "metadata") if key not in row]
    if missing:
        raise DatasetError(
            f"rollout {rollout_id}: the row lacks {missing}, which the verifier reads"
        )
    source = row["metadata"].get("source_dataset")
    if source != family:
        raise DatasetError(
            f"rollout {rollout_id}: the row is of family {source!r}, its agent scores {family!r}"
        )
    return {key: row[key] for key in ("question", "answer", "metadata")}
