"""Interleaving of streams: order, failure by name, and nothing left running."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.gyms.merge import StreamFailed, merge


class Stream:
    """Gives its items when told to; knows whether its next was cancelled and whether it closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[object] = asyncio.Queue()
        self.cancelled = False
        self.closed = False

    async def __call__(self) -> AsyncIterator[object]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.closed = True


def run(scenario) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(within())


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=6)))
def test_every_item_once_in_its_streams_own_order(plan):
    """The numbers are how many turns of the event loop a stream waits before an item."""

    async def stream(name: str) -> AsyncIterator[int]:
        for position, turns in enumerate(plan[name]):
            for _ in range(turns):
                await asyncio.sleep(0)
            yield position

    async def scenario() -> None:
        seen: dict[str, list[int]] = {name: [] for name in plan}
        async for name, item in merge({name: stream(name) for name in plan}):
            seen[name].append(item)
        assert seen == {name: list(range(len(turns))) for name, turns in plan.items()}

    run(scenario)


def test_a_silent_stream_holds_nobody_up():
    async def scenario() -> None:
        silent, quick = Stream(), Stream()
        merged = merge({"silent": silent(), "quick": quick()})
        for item in (1, 2, 3):
            quick.items.put_nowait(item)
            assert await anext(merged) == ("quick", item)
        silent.items.put_nowait("late")
        assert await anext(merged) == ("silent", "late")
        await merged.aclose()

    run(scenario)


def test_leaving_early_cancels_the_nexts_in_flight_and_closes_every_stream():
    async def scenario() -> None:
        first, second = Stream(), Stream()
        first.items.put_nowait(1)
        merged = merge({"first": first(), "second": second()})
        assert await anext(merged) == ("first", 1)
        await merged.aclose()
        assert second.cancelled
        assert (first.closed, second.closed) == (True, True)

    run(scenario)


def test_cancelling_the_reader_cancels_the_streams():
    async def scenario() -> None:
        stream = Stream()

        async def read() -> None:
            async for _ in merge({"only": stream()}):
                pass

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert stream.closed

    run(scenario)


def test_a_failure_has_its_streams_name_and_comes_after_what_was_ready():
    async def scenario() -> None:
        streams = {name: Stream() for name in ("a", "broken", "b")}
        streams["a"].items.put_nowait(1)
        streams["broken"].items.put_nowait(ValueError("no such town"))
        streams["b"].items.put_nowait(2)
        seen = []

        async def read() -> None:
            async for item in merge({name: stream() for name, stream in streams.items()}):
                seen.append(item)

        with pytest.raises(StreamFailed, match="'broken' failed: ValueError: no such") as error:
            await read()
        assert sorted(seen) == [("a", 1), ("b", 2)]
        assert error.value.stream == "broken"
        assert isinstance(error.value.__cause__, ValueError)
        assert all(stream.closed for stream in streams.values())

    run(scenario)


def test_no_streams_are_an_empty_stream():
    async def scenario() -> None:
        assert [item async for item in merge({})] == []

    run(scenario)
