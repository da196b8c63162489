"""One `groupstream up` a run and machine: a lock on a file of the run's directory."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from schemas.errors import ConfigError

NAME = "up.lock"
CLEAN_UP_S = 90.0  # the guardian of one that was killed still stops its broker
REPORT_S = 2.0


@contextmanager
def only_one(run_directory: Path, note: Callable[[str], None]) -> Iterator[int]:
    """Yields the locked file's descriptor: who inherits it keeps the lock.

    Raises ConfigError when another one runs.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    path = run_directory / NAME
    with path.open("a+b") as file:
        _take(file.fileno(), path, note)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield file.fileno()


def _take(descriptor: int, path: Path, note: Callable[[str], None]) -> None:
    started = reported = time.monotonic()
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
        holder = path.read_text().strip()
        if (holder.isdigit() and psutil.pid_exists(int(holder))) or now - started > CLEAN_UP_S:
            raise ConfigError(
                f"this run is up already, in process {holder}: stop that one first, or choose "
                f"another run.id (the lock is {path})"
            )
        if now - reported > REPORT_S:
            reported = now
            note(f"waiting for what an earlier `up` left to be stopped ({now - started:.0f} s)")
        time.sleep(0.1)
