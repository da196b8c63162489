"""A record as Kafka stores it, free of any client. Pure."""

from typing import NamedTuple

from schemas.codec import PREFIX_BYTES, decode
from schemas.errors import RecordUnreadable
from schemas.identity import key_of
from schemas.records import OfAttempt, Record


class Place(NamedTuple):
    """Of one record in a topic."""

    partition: int
    offset: int


class Stored(NamedTuple):
    """`at_ms` is Kafka's timestamp, `value` None for a tombstone."""

    place: Place
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]

    @property
    def size_bytes(self) -> int:
        return len(self.value or b"")


def decoded(value: bytes | None) -> Record | None:
    """None for what does not decode."""
    try:
        return decode(value or b"")
    except RecordUnreadable:
        return None


class Naming:
    """Which records name one task, without decoding the others.

    Every record about an attempt begins with run_id and task_index, and its key is the task's.
    Where the two differ, the record counts.
    """

    def __init__(self, run_id: str, task_index: int) -> None:
        self._task_index = task_index
        self._key = key_of(task_index)
        name = run_id.encode()
        self._begins = _long(len(name)) + name + _long(task_index)

    def matches(self, stored: Stored) -> bool:
        value = stored.value or b""
        if stored.key != self._key and not value.startswith(self._begins, PREFIX_BYTES):
            return False
        record = decoded(value)
        return not isinstance(record, OfAttempt) or record.task_index == self._task_index


def _long(number: int) -> bytes:
    """Avro's zig-zag variable-length long."""
    left = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)
