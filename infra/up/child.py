"""One role's process: in a session of its own, its output in its log file."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from infra.cli.exit_codes import ExitCode
from infra.up.roles import RoleProcess


class Child:
    """Started again under the same name after it ended.

    start() belongs to one thread that lives as long as the supervisor: for Linux that thread, not
    the process, is the parent whose end ends the child.
    """

    def __init__(self, role: RoleProcess, log_directory: Path, environment: Mapping[str, str]):
        self.role = role
        self.log_path = log_directory / f"{role.name}.log"
        self.starts = 0
        self.started_s = 0.0
        self.returncode: int | None = None
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def lived_s(self) -> float:
        """Since its last start."""
        return time.monotonic() - self.started_s

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.role.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                start_new_session=True,
            )
        self.starts += 1
        self.started_s = time.monotonic()
        self.returncode = None

    def has_ended(self) -> bool:
        """True once it has; what its session left is killed then, and `returncode` set."""
        if self._process is None:
            return True
        returncode = self._process.poll()
        if returncode is None:
            return False
        self._signal_session(signal.SIGKILL)
        unknown = self.role.through_torchrun and returncode == 1
        self.returncode = ExitCode.FAILED if unknown else returncode
        self._process = None
        return True

    def ask_to_stop(self) -> None:
        """SIGTERM to the role alone: what it started is its own to stop."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to everything in its session."""
        if self._process is not None:
            self._signal_session(signal.SIGKILL)

    def last_lines(self, count: int = 12) -> str:
        """The end of its log, for an error message."""
        if not self.log_path.exists():
            return f"({self.log_path} does not exist)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-count:])

    def _signal_session(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
