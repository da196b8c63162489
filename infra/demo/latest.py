"""Which demo run was started last, so that it can be continued."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

NAME = "latest.json"


@dataclass(frozen=True)
class LatestRun:
    run_id: str
    config_file: str
    assemblers: int
    finished: bool


def read_latest(directory: Path) -> LatestRun | None:
    """None before the first run, and where its files were removed."""
    try:
        latest = LatestRun(**orjson.loads((directory / NAME).read_bytes()))
    except FileNotFoundError:
        return None
    return latest if Path(latest.config_file).exists() else None


def write_latest(directory: Path, latest: LatestRun) -> None:
    """Replaces the file atomically."""
    partial = directory / f"{NAME}.{os.getpid()}.partial"
    partial.write_bytes(orjson.dumps(asdict(latest), option=orjson.OPT_INDENT_2))
    partial.replace(directory / NAME)
