"""Follows `control` in a thread of its own: versions, the end of the run, its failure."""

import asyncio
import threading
from collections.abc import Callable

from schemas.config import KafkaConfig
from schemas.control import ControlLog, ControlState
from schemas.errors import DeadlineExceeded
from schemas.topics import Topics

POLL_S = 0.1


class ControlWatch:
    """`changed` is set, on the event loop, whenever `state` took in new records or the thread
    failed."""

    def __init__(self, kafka: KafkaConfig, topics: Topics, client_id: str) -> None:
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self._log = ControlLog(kafka, topics, client_id)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ControlState:
        """Read single fields: the thread writes each of them at once."""
        return self._log.state

    async def read(self) -> ControlState:
        """The state as of the start of this watch, at least. Raises DeadlineExceeded."""
        await self._ready
        if self._error is not None:
            raise self._error
        return self.state

    def has_finished(self) -> bool:
        """Raises RunStopped where the run was declared fatal, and what ended the thread."""
        if self._error is not None:
            raise self._error
        self.state.raise_if_fatal()
        return self.state.finished is not None

    async def close(self, deadline_s: float) -> None:
        """Raises DeadlineExceeded."""
        self._closing.set()
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the consumer of control did not close within {deadline_s:g} s")

    def _run(self) -> None:
        try:
            self._log.read_to_end()
            self._tell(self._now_ready)
            while not self._closing.is_set():
                if self._log.poll(POLL_S):
                    self._tell(self.changed.set)
            self._log.close()
        except Exception as error:
            self._error = error
            self._tell(self._now_ready)

    def _now_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)
        self.changed.set()

    def _tell(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
