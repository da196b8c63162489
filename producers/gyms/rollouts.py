"""The rows of one group, run side by side and given in the order in which they end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from producers.generation.generation import GenerationFailed
from producers.gyms.protocol import RolloutRequest, RolloutResult, Timing

Rollout = Callable[[RolloutRequest, int], Awaitable[RolloutResult]]


async def run_rows(
    group: RolloutRequest, rollout: Rollout
) -> AsyncIterator[tuple[int, RolloutResult, Timing | None]]:
    """`Gym.run` for a gym that has one coroutine a row: rollout(group, row_index).

    The last row carries the seconds from the start to the first and to the last row. Raises what
    the first failed row raised, and GenerationFailed("infra") past the group's deadline; the rows
    that still run are cancelled then, and when the iterator is closed early.
    """
    started_s = time.monotonic()
    tasks = {
        asyncio.ensure_future(rollout(group, index)): index for index in range(len(group.rows))
    }
    pending = set(tasks)
    first_row_s = 0.0
    try:
        while pending:
            left_s = started_s + group.deadline_s - time.monotonic()
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise GenerationFailed(
                    "infra",
                    f"task {group.task_index} attempt {group.attempt}: rows "
                    f"{sorted(tasks[task] for task in pending)} did not end within "
                    f"{group.deadline_s:g} s",
                )
            elapsed_s = time.monotonic() - started_s
            first_row_s = first_row_s or elapsed_s
            results = [(tasks[task], task.result()) for task in done]
            for position, (index, result) in enumerate(results):
                last = not pending and position == len(results) - 1
                timing = {"first_row": first_row_s, "run_rollouts": elapsed_s} if last else None
                yield index, result, timing
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
