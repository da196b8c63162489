"""Reads the trainer's metrics file again when it has grown."""

from pathlib import Path

from infra.screen.facts import Step, steps_of


class MetricsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1

    def changed(self) -> list[Step] | None:
        """Every step, or None where nothing is new."""
        if not self._path.exists() or self._path.stat().st_size == self._size:
            return None
        content = self._path.read_bytes()
        self._size = len(content)
        return steps_of(content.splitlines(keepends=True))
