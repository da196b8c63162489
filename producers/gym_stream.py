"""The items of one `Gym.run`, under a deadline, from a task that lives as long as the run.

One task and not one for each item: a gym may open timeouts and task groups in `run`, which must be
left by the task that entered them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from producers.gyms.protocol import Gym, RolloutRequest, RolloutResult, Timing

logger = logging.getLogger(__name__)

GRACE_S = 0.25  # a gym that keeps the deadline itself says better than we do what did not end
STOP_S = 2.0
Item = tuple[int, RolloutResult, Timing | None]


class AttemptOverdue(Exception):
    """The attempt's deadline passed."""

    failure_class = "infra"


class GymCancelled(Exception):
    """Something inside the gym cancelled its run; nobody outside asked for it."""

    failure_class = "infra"


@dataclass(frozen=True)
class _Ended:
    """After the last item: the error that the run ended with, if any."""

    error: BaseException | None


class GymStream:
    """An async iterator; close() it in any case. `who` names the attempt in logs."""

    def __init__(self, gym: Gym, request: RolloutRequest, who: str) -> None:
        self._who = who
        self._closing = False
        self._deadline_s = request.deadline_s
        self._left_s = request.deadline_s + GRACE_S
        self._queue: asyncio.Queue[Item | _Ended] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(gym, request), name=f"gym of {who}")

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        """Raises what the gym raised, and AttemptOverdue.

        Only the time in here counts against the deadline: what the caller does between two items,
        such as waiting for Kafka, does not.
        """
        since_s = time.monotonic()
        try:
            item = await asyncio.wait_for(self._queue.get(), max(0.0, self._left_s))
        except TimeoutError:
            raise AttemptOverdue(f"not done within its {self._deadline_s:g} s") from None
        self._left_s -= time.monotonic() - since_s
        if not isinstance(item, _Ended):
            return item
        if item.error is not None:
            raise item.error
        raise StopAsyncIteration

    async def close(self, *, may_end_s: float) -> None:
        """Cancels the run, after `may_end_s` in which it may end by itself."""
        await asyncio.wait({self._task}, timeout=may_end_s)
        self._closing = True
        self._task.cancel()
        _, pending = await asyncio.wait({self._task}, timeout=STOP_S)
        if pending:
            logger.error("the gym of %s ignores its cancellation for %g s", self._who, STOP_S)
        while not self._queue.empty():
            left = self._queue.get_nowait()
            if isinstance(left, _Ended) and isinstance(left.error, Exception):
                logger.warning("the gym of %s, after its last row: %r", self._who, left.error)

    async def _run(self, gym: Gym, request: RolloutRequest) -> None:
        error: BaseException | None = None
        try:
            stream = gym.run(request)
            try:
                async for item in stream:
                    self._queue.put_nowait(item)
            finally:
                close = getattr(stream, "aclose", None)  # plain iterators need not have it
                if close is not None:
                    await close()
        except asyncio.CancelledError:
            if not self._closing:
                error = GymCancelled("something inside the gym cancelled its run")
            raise
        except Exception as raised:
            error = raised
        finally:
            self._queue.put_nowait(_Ended(error))
