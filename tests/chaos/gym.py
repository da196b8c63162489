"""A gym without a model, whose every rollout follows from the seed, the task and the attempt.

Most groups take some hundredths of a second. Some fail once, some always, some claim weights that
are too old, and some take seconds, so that whatever is killed has work in its hands.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.gyms.protocol import RolloutRequest, RolloutResult, Timing
from tests.rows import make_trace

FAILS_ONCE, FAILS_ALWAYS, IS_STALE, IS_SLOW = 0.01, 0.002, 0.005, 0.02
ROW_S = 0.03  # at most, between two rows
SLOW_S = 2.0  # at most, before the first row
TOKENS = (4, 64)
TOO_OLD = 2  # versions behind, where one is allowed


class ScriptedError(Exception):
    """The script says that this attempt fails."""


class ChaosGym:
    """Settings of each agent: `seed`, and `version_file`, where the newest policy version is."""

    needs_engine = False

    def __init__(
        self, agents: tuple[str, ...], model: object, settings: dict[str, dict[str, Any]]
    ) -> None:
        assert model is None
        self.agents = agents
        self._settings = settings

    async def run(
        self, group: RolloutRequest
    ) -> AsyncIterator[tuple[int, RolloutResult, Timing | None]]:
        settings = self._settings[group.agent]
        script = script_of(settings["seed"], group.task_index, group.attempt)
        of_attempt = random.Random(f"{settings['seed']} {group.task_index} {group.attempt}")
        version = _read_version(settings["version_file"])
        if script.is_stale:
            version = max(0, version - TOO_OLD)
        if script.is_slow:
            await asyncio.sleep(of_attempt.uniform(0, SLOW_S))
        order = of_attempt.sample(range(len(group.rows)), len(group.rows))
        for position, index in enumerate(order, start=1):
            await asyncio.sleep(of_attempt.uniform(0, ROW_S))
            last = position == len(order)
            if last and script.fails:
                raise ScriptedError(f"task {group.task_index} attempt {group.attempt} fails")
            result = RolloutResult(
                reward=float(of_attempt.randrange(2)),
                traces=[
                    make_trace(
                        group.rollout_ids[index],
                        tokens=of_attempt.randint(*TOKENS),
                        version=version,
                        seed=group.task_index * 64 + index,
                    )
                ],
                version_start=version,
            )
            yield index, result, {"run": 0.1} if last else None


@dataclass(frozen=True)
class Script:
    """What an attempt does that is not usual."""

    fails: bool
    is_stale: bool
    is_slow: bool


def script_of(seed: int, task_index: int, attempt: int) -> Script:
    of_task = random.Random(f"{seed} {task_index}")
    return Script(
        fails=fails_now(of_task.random(), attempt),
        is_stale=of_task.random() < IS_STALE and attempt == 0,
        is_slow=of_task.random() < IS_SLOW,
    )


def fails_now(share: float, attempt: int) -> bool:
    """`share` is the task's own, evenly distributed between 0 and 1."""
    if share < FAILS_ALWAYS:
        return True
    return share < FAILS_ALWAYS + FAILS_ONCE and attempt == 0


def _read_version(path: str) -> int:
    return int(Path(path).read_text())
