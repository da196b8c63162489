"""Where a process writes what it does: standard error, and a file of the run's log directory."""

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

CAPTURED = "GROUPSTREAM_LOG_IS_CAPTURED"  # set by a supervisor that keeps our standard error itself
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NOISY = ("kafka", "urllib3", "filelock", "fsspec", "asyncio")


def log_to_terminal() -> None:
    """Sets up the root logger for standard error alone."""
    _configure([_terminal()])


def log_to(directory: Path, name: str) -> None:
    """Sets up the root logger; `<directory>/<name>.log` is appended to."""
    _configure([_terminal()] if os.environ.get(CAPTURED) else [_terminal(), _file(directory, name)])


def log_to_file(directory: Path, name: str) -> None:
    """As log_to, without standard error: a live screen is there."""
    _configure([_file(directory, name)])


def _configure(handlers: list[logging.Handler]) -> None:
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _file(directory: Path, name: str) -> logging.Handler:
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory / f"{name}.log")
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


def _terminal() -> logging.Handler:
    if sys.stderr.isatty():
        console = Console(stderr=True, soft_wrap=True)
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
    return handler
