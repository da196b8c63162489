"""A gym without a model, for tests of the shard: its rows say what it does."""

import asyncio

from producers.gyms.protocol import RolloutResult
from tests.rows import make_trace


class TinyGym:
    """Row keys: `sleep_s` before the first row, `error` to raise in place of the second, `tokens`
    of each row."""

    needs_engine = False

    def __init__(self, agents, model, settings):
        assert model is None
        self.agents = agents
        self.settings = settings

    async def run(self, group):
        first = group.rows[0]
        await asyncio.sleep(first.get("sleep_s", 0))
        for index in range(len(group.rows)):
            if index == 1 and "error" in first:
                raise LookupError(first["error"])
            name, tokens = group.rollout_ids[index], first.get("tokens", 8)
            result = RolloutResult(
                reward=float(index),
                traces=[make_trace(name, tokens=tokens, seed=index)],
                version_start=0,
            )
            last = index == len(group.rows) - 1
            yield index, result, {"run": 0.5} if last else None
