"""Python imports this at its start: the wall clock of a role's process runs where the test says.

The file that GROUPSTREAM_CHAOS_CLOCK names has one little-endian int64: nanoseconds to add to the
true time, from now on. Monotonic clocks are untouched, and so is `datetime`, which no role reads.
"""

import mmap
import os
import struct
import time

_NS = struct.Struct("<q")


def _shift() -> None:
    path = os.environ.get("GROUPSTREAM_CHAOS_CLOCK")
    if path is None:
        return
    with open(path, "rb") as file:  # noqa: PTH123 (pathlib would make every start slower)
        shared = mmap.mmap(file.fileno(), _NS.size, access=mmap.ACCESS_READ)
    true_ns = time.time_ns

    def time_ns() -> int:
        return true_ns() + int(_NS.unpack_from(shared)[0])

    def seconds() -> float:
        return time_ns() / 1e9

    time.time_ns, time.time = time_ns, seconds


_shift()
