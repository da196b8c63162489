"""Many async streams as one, each item as soon as any stream has it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from schemas.errors import GroupstreamError

Item = TypeVar("Item")


class StreamFailed(GroupstreamError):
    """One of the merged streams raised; `stream` is its name and `__cause__` its error."""

    def __init__(self, stream: str, error: BaseException) -> None:
        super().__init__(f"stream {stream!r} failed: {type(error).__name__}: {error}")
        self.stream = stream


async def merge(streams: Mapping[str, AsyncIterator[Item]]) -> AsyncIterator[tuple[str, Item]]:
    """Yields (name, item), in each stream's own order and with no order between streams.

    At most one item a stream is taken ahead. A stream that fails ends the merge with StreamFailed,
    after the items that the others had ready at that moment. Left early or failed, the nexts in
    flight are cancelled and every stream is closed. Streams bring their own deadlines.
    """
    waiting = {asyncio.ensure_future(anext(stream)): name for name, stream in streams.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed: StreamFailed | None = None
            ready: list[tuple[str, Item]] = []
            for task in done:
                name = waiting.pop(task)
                error = task.exception()
                if error is None:
                    ready.append((name, task.result()))
                elif not isinstance(error, StopAsyncIteration):
                    failed = failed or _caused(name, error)
            for name, item in ready:
                yield name, item
            if failed is not None:
                raise failed
            for name, _item in ready:
                waiting[asyncio.ensure_future(anext(streams[name]))] = name
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(_close(stream) for stream in streams.values()))


def _caused(name: str, error: BaseException) -> StreamFailed:
    failed = StreamFailed(name, error)
    failed.__cause__ = error
    return failed


async def _close(stream: AsyncIterator[Item]) -> None:
    close = getattr(stream, "aclose", None)  # generators have it, plain iterators need not
    if close is not None:
        await close()
