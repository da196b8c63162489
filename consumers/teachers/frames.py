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


def write_frame(pipe: int, message: Any) -> None:
    """Raises BrokenPipeError."""
    body = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def read_frame(pipe: int, deadline_s: float | None = None) -> Any:
    """Raises PipeClosed, PipeSilent after `deadline_s`."""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, end))
    return msgspec.msgpack.decode(_read(pipe, length, end))


def _read(pipe: int, size: int, end: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        wait_s = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([pipe], [], [], wait_s)[0]:
            raise PipeSilent
        part = os.read(pipe, min(CHUNK_BYTES, size - len(parts)))
        if not part:
            raise PipeClosed
        parts += part
    return bytes(parts)
