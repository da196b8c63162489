"""Which tasks of one `rows` partition are done, in a form that fits an offset commit.

Pure: no Kafka, no clock. `consumers/worker.py` commits `encode()` as the offset's metadata and,
after a restart, hands it to `decode()`. An ordinal is `task_index // P`.
"""

import base64
import struct
from typing import Self

from schemas.errors import MetadataUnreadable, OrdinalTooFar

MAX_AHEAD = 16_384  # ordinals above the watermark: 2,756 characters, where a commit takes 4,095
FORMAT = 1  # a later layout takes 2 and still reads 1
_HEADER = struct.Struct("<BQQ")  # format, seen, watermark


class SettledSet:
    """Every ordinal below `watermark`, and a bitmap: bit i is ordinal `watermark + i`.

    Bit 0 is always clear. After add(0), add(2) the watermark is 1; add(1) moves it to 3.
    """

    def __init__(self, watermark: int = 0, bitmap: int = 0) -> None:
        self.watermark = watermark
        self._bitmap = bitmap

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.watermark or bool(self._bitmap >> (ordinal - self.watermark) & 1)

    @property
    def end(self) -> int:
        """One past the highest settled ordinal."""
        return self.watermark + self._bitmap.bit_length()

    def add(self, ordinal: int) -> None:
        """Raises OrdinalTooFar; the assembler turns such a row away when it arrives."""
        if ordinal in self:
            return
        ahead = ordinal - self.watermark
        if ahead > MAX_AHEAD:
            raise OrdinalTooFar(
                f"ordinal {ordinal} is {ahead} above watermark {self.watermark}, limit {MAX_AHEAD}"
            )
        self._bitmap |= 1 << ahead
        low_ones = (~self._bitmap & (self._bitmap + 1)).bit_length() - 1  # no gap below these
        self._bitmap >>= low_ones
        self.watermark += low_ones

    def encode(self, seen: int) -> str:
        """This set and `seen`, the highest position ever committed, as base64."""
        bitmap = self._bitmap.to_bytes((self._bitmap.bit_length() + 7) // 8, "little")
        return base64.b64encode(_HEADER.pack(FORMAT, seen, self.watermark) + bitmap).decode()

    @classmethod
    def decode(cls, metadata: str) -> tuple[Self, int]:
        """Raises MetadataUnreadable: an empty set instead would train groups twice."""
        try:
            payload = base64.b64decode(metadata.rstrip("\0"), validate=True)
            version, seen, watermark = _HEADER.unpack_from(payload)
        except (ValueError, struct.error) as error:
            raise MetadataUnreadable(f"{metadata[:40]!r}: {error}") from error
        if version != FORMAT:
            raise MetadataUnreadable(f"metadata has format {version}, we read {FORMAT}")
        return cls(watermark, int.from_bytes(payload[_HEADER.size :], "little")), seen
