"""A small disk for the broker's data, which can be filled up: a tmpfs, so only root has one."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

DISK_BYTES = 512 << 20
MOUNT_S = 20.0


class NoDisk(Exception):
    """It cannot be mounted here; the message says why."""


class SmallDisk:
    """Mounted at `path`. A context manager that unmounts it."""

    def __init__(self, path: Path, size_bytes: int = DISK_BYTES) -> None:
        """Raises NoDisk."""
        self._path = path.absolute()
        self._filler = self._path / "filler"
        if os.geteuid() != 0:
            raise NoDisk("only root may mount a tmpfs for the broker's data")
        self._path.mkdir(parents=True, exist_ok=True)
        options = f"size={size_bytes},mode=0755"
        failure = _run("mount", "-t", "tmpfs", "-o", options, "groupstream-chaos", str(self._path))
        if failure:
            raise NoDisk(f"no tmpfs at {self._path}: {failure}")

    def fill(self) -> int:
        """Until nothing more can be written; how many bytes that took."""
        with self._filler.open("ab") as file:
            taken = 0
            for step in (1 << 24, 1 << 20, 1 << 12):
                with suppress(OSError):  # no space left for a step of this size
                    while True:
                        os.posix_fallocate(file.fileno(), taken, step)
                        taken += step
        return taken

    def empty(self) -> None:
        """Takes away only what fill() put there."""
        self._filler.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        unmount(self._path)


def unmount(path: Path) -> None:
    """Nothing where nothing is mounted: what an earlier run left, too."""
    if path.is_mount():
        _run("umount", "--lazy", str(path.absolute()))


def _run(*command: str) -> str:
    """What it says where it fails, else nothing."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=MOUNT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
