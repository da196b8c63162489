"""A broker's directory: its data, its settings, its log, and the record of what runs there.

The record survives a crash of whoever started the broker, so that a later run finds the leftover.
"""

import base64
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson

from infra.broker.errors import BrokerError
from infra.broker.waiting import Progress, wait_until

FORMAT = 1
LOCK_S = 180.0  # another start in this directory: at most a first download and a broker's start


@dataclass(frozen=True)
class Running:
    """The broker that was last started here. `pid` or `container` is set while it should run.

    `created_s` is the process's start (seconds since the epoch): a pid alone is reused.
    """

    how: str
    port: int
    controller_port: int
    pid: int | None = None
    created_s: float | None = None
    container: str | None = None

    def ended(self) -> "Running":
        """The same ports, nothing that runs."""
        return replace(self, pid=None, created_s=None, container=None)


@dataclass(frozen=True)
class BrokerDirectory:
    """Names the files; `path` is absolute."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "BrokerDirectory":
        """Makes the directory. Raises OSError when it cannot be made."""
        absolute = path.expanduser().resolve()
        absolute.mkdir(parents=True, exist_ok=True)
        return cls(absolute)

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def properties(self) -> Path:
        return self.path / "server.properties"

    @property
    def log(self) -> Path:
        return self.path / "broker.log"

    @property
    def record(self) -> Path:
        return self.path / "broker.json"

    @property
    def is_formatted(self) -> bool:
        return (self.data / "meta.properties").exists()

    def read_running(self) -> Running | None:
        """None before the first start. Raises BrokerError when the record cannot be read."""
        try:
            written = orjson.loads(self.record.read_bytes())
            version = written.pop("format")
            if version != FORMAT:
                raise ValueError(f"format {version}, this version reads {FORMAT}")
            return Running(**written)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BrokerError(
                f"{self.record} does not say which broker runs here ({error!r}): stop the broker "
                "of that directory, if any runs, and remove the file"
            ) from error

    def write_running(self, running: Running) -> None:
        """Replaces the record atomically."""
        text = orjson.dumps({"format": FORMAT, **asdict(running)}, option=orjson.OPT_INDENT_2)
        partial = self.record.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(text)
        partial.replace(self.record)


@contextmanager
def locked(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; a crash lets it go. Raises WaitTimedOut."""
    with path.open("ab") as file:

        def taken() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        wait_until(taken, f"waiting for another process: {what}", LOCK_S, progress)
        yield


def new_cluster_id() -> str:
    """22 characters, as Kafka writes a random UUID; never with a dash first, an option's sign."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
