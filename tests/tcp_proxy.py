"""A TCP proxy on 127.0.0.1 that can lose the network between its clients and one server.

The server must name the proxy's port to its clients: start_broker(proxied={listener: proxy.port}).

open ── cut() ─▶ connections reset, new ones refused        heal() from both ─▶ open
open ── freeze() ─▶ connections stay, no byte gets through; what was sent arrives after heal()
While the server does not listen, the proxy does not either: a client sees what it would without it.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Self

from infra.broker.ports import free_port

HOST = "127.0.0.1"
CHUNK_BYTES = 256 << 10
ACT_S = 10.0
AGAIN_S = 0.05  # how soon the return of the server is noticed
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST, not FIN

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """Open from the start. Its methods may be called by any thread; it works in one of its own."""

    def __init__(self, server_port: int, port: int | None = None) -> None:
        """Listens on `port`, by default a free one. Raises OSError where it is taken."""
        self.port = port or free_port()
        self.server_port = server_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._is_cut = False
        self._awaiting: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._lets_through = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        try:
            self.heal()
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Resets every connection and refuses new ones."""
        self._do(self._cut)

    def freeze(self) -> None:
        """Connections stay and new ones are taken, but nothing goes through, either way."""
        self._do(self._freeze)

    def heal(self) -> None:
        """Lets through what waited, and takes connections again."""
        self._do(self._heal)

    def close(self) -> None:
        """Resets what is left and ends the thread; again is no error."""
        if self._loop.is_closed():
            return
        self._do(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ACT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, act: Callable[[], Awaitable[None]]) -> None:
        async def acted() -> None:
            await act()

        done: Future[None] = asyncio.run_coroutine_threadsafe(acted(), self._loop)
        done.result(ACT_S)

    async def _cut(self) -> None:
        self._is_cut = True
        self._refuse()
        self._lets_through.set()  # who waits there finds its connection gone
        for writer in list(self._writers):
            _reset(writer)

    async def _freeze(self) -> None:
        self._is_cut = False
        await self._listen()
        self._lets_through.clear()

    async def _heal(self) -> None:
        self._is_cut = False
        await self._listen()
        self._lets_through.set()

    async def _end(self) -> None:
        await self._cut()
        left = [*self._connections, *filter(None, [self._awaiting])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _await_server(self) -> None:
        """Listens again once the server takes connections."""
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.server_port)
                writer.close()
                break
            await asyncio.sleep(AGAIN_S)
        self._awaiting = None
        if not self._is_cut:
            await self._listen()

    async def _listen(self) -> None:
        if self._listener is None and self._awaiting is None:
            self._listener = await asyncio.start_server(
                self._connected, HOST, self.port, limit=CHUNK_BYTES, reuse_address=True
            )

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        try:
            await self._lets_through.wait()
            server = await asyncio.open_connection(HOST, self.server_port, limit=CHUNK_BYTES)
            await self._joined((reader, writer), server)
        except OSError:
            # the server is not there
            if self._awaiting is None:
                self._refuse()
                self._awaiting = asyncio.create_task(self._await_server())
            _reset(writer)
        finally:
            self._writers.discard(writer)
            self._connections.discard(task)

    async def _joined(self, client: Stream, server: Stream) -> None:
        """Until one side ends: then both do, in the same way."""
        _, to_server = server
        self._writers.add(to_server)
        there = asyncio.create_task(self._pump(client[0], to_server))
        back = asyncio.create_task(self._pump(server[0], client[1]))
        try:
            done, _ = await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            in_order = all(task.exception() is None for task in done)
            for writer in (client[1], to_server):
                writer.close() if in_order else _reset(writer)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            self._writers.discard(to_server)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises OSError where a side was reset; returns at the end of the stream."""
        while True:
            chunk = await reader.read(CHUNK_BYTES)
            await self._lets_through.wait()
            if not chunk:
                return
            writer.write(chunk)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE
        )
    writer.transport.abort()
