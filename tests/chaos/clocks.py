"""The wall clocks of the roles: each has its own, and the driver sets what it shows."""

import struct
from collections.abc import Iterable
from pathlib import Path

SHIM = Path(__file__).parent / "shifted_clock"  # goes first on the roles' PYTHONPATH
VARIABLE = "GROUPSTREAM_CHAOS_CLOCK"
NS = 1_000_000_000


class Clocks:
    """A file a role, mapped by its process: a jump is seen at the next look at the clock."""

    def __init__(self, directory: Path, roles: Iterable[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._files = {role: directory / f"{role}.clock" for role in roles}
        for role in self._files:
            self._files[role].write_bytes(_shift(0.0))

    def environment(self, role: str) -> dict[str, str]:
        return {VARIABLE: str(self._files[role].absolute())}

    def jump(self, role: str, shift_s: float) -> None:
        """To `shift_s` ahead of the true time; negative: behind it."""
        with self._files[role].open("r+b", buffering=0) as file:
            file.write(_shift(shift_s))


def _shift(shift_s: float) -> bytes:
    return struct.pack("<q", int(shift_s * NS))
