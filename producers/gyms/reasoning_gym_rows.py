"""New problems of reasoning-gym as a dataset in NeMo Gym's row format, one JSON a line."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import reasoning_gym

from producers.gyms.reasoning_gym import FamilySettings, family_settings
from schemas.errors import ConfigError


def rows(
    agents: dict[str, dict[str, Any]], rows_per_agent: int, seed: int
) -> Iterator[dict[str, Any]]:
    """The agents' problems by turns; equal arguments give equal rows. Raises ConfigError."""
    problems = {}
    for agent, settings in agents.items():
        family = family_settings(agent, settings)
        problems[agent] = (family, _problems(agent, family, rows_per_agent, seed))
    for index in range(rows_per_agent):
        for agent, (family, problem) in problems.items():
            yield _row(agent, family, problem[index])


def write_dataset(
    path: Path, agents: dict[str, dict[str, Any]], rows_per_agent: int, seed: int
) -> None:
    """`rows` as a file, complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        for row in rows(agents, rows_per_agent, seed):
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    unfinished.replace(path)


def _problems(agent: str, family: FamilySettings, size: int, seed: int) -> Any:
    # reasoning-gym seeds problem i with seed + i: agents must start far apart.
    start = int.from_bytes(hashlib.sha256(f"{seed}/{agent}".encode()).digest()[:6], "big")
    try:
        return reasoning_gym.create_dataset(
            family.family, seed=start, size=size, **family.parameters
        )
    except (TypeError, AssertionError) as error:
        raise ConfigError(
            f"env.agents.{agent}.settings.parameters: {family.family} says: {error}"
        ) from error


def _row(agent: str, family: FamilySettings, problem: dict[str, Any]) -> dict[str, Any]:
    fields = {**problem["metadata"], "question": problem["question"]}
    try:
        text = family.prompt.format_map(fields)
    except KeyError as error:
        raise ConfigError(
            f"env.agents.{agent}.settings.prompt names {error}; {family.family} has "
            f"{sorted(fields)}"
        ) from error
    return {
        "responses_create_params": {"input": text},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "question": problem["question"],
        "answer": problem["answer"],
        "metadata": problem["metadata"],
    }
