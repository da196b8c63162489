"""A directory that other processes see complete or not at all, and whose name is used once."""

import os
from pathlib import Path


def partial_path(target: Path, token: str) -> Path:
    """Where `target` is written first. `token` tells writers apart: the producer's epoch."""
    return target.parent / f".{target.name}.partial-{token}"


def refuse_existing(target: Path) -> None:
    """Raises FileExistsError: readers may hold what stands there already."""
    if target.exists():
        raise FileExistsError(f"{target} exists; a name is never used twice, choose the next one")


def publish(partial: Path, target: Path) -> None:
    """Makes every byte durable, then renames. Raises FileExistsError as `refuse_existing`."""
    for path in sorted(partial.rglob("*")):
        if path.is_file() or path.is_dir():
            _fsync(path)
    _fsync(partial)
    refuse_existing(target)
    partial.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
