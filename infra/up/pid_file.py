"""Which process plays which role now: one JSON object in the run's directory, name to pid."""

import os
from pathlib import Path

import orjson

NAME = "pids.json"


def write_pids(run_directory: Path, pids: dict[str, int]) -> None:
    """Replaces the file atomically."""
    path = run_directory / NAME
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(orjson.dumps(pids, option=orjson.OPT_INDENT_2))
    partial.replace(path)


def read_pids(run_directory: Path) -> dict[str, int]:
    """Empty before the first start."""
    try:
        pids: dict[str, int] = orjson.loads((run_directory / NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return pids
