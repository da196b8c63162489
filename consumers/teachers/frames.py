"""Messages through a pipe: four bytes of length, then MessagePack."""

import os
import select
import struct
import time
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
CHUNK_BYTES = 1 << 20


class PipeClosed(Exception):
    """The other end is gone."""


class PipeSilent(Exception):
    """Nothing more came in time."""


def write_frame(pipe: int, message: Any, deadline_s: float | None = None) -> None:
    """Raises BrokenPipeError, PipeSilent where the other end does not take it in `deadline_s`."""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    body = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        if not select.select([], [pipe], [], _left(end))[1]:
            raise PipeSilent
        # No more than a pipe that can be written takes at once, so the write never blocks.
        rest = rest[os.write(pipe, rest[: select.PIPE_BUF]) :]


def read_frame(pipe: int, deadline_s: float | None = None) -> Any:
    """Raises PipeClosed, PipeSilent after `deadline_s`."""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, end))
    return msgspec.msgpack.decode(_read(pipe, length, end))


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _read(pipe: int, size: int, end: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not select.select([pipe], [], [], _left(end))[0]:
            raise PipeSilent
        part = os.read(pipe, min(CHUNK_BYTES, size - len(parts)))
        if not part:
            raise PipeClosed
        parts += part
    return bytes(parts)
