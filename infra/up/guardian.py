"""Ends what a killed `groupstream up` leaves: its roles and its broker.

A process of its own that reads from a pipe which only the supervisor holds open:
the word "done" ─▶ nothing to do          the pipe's end without it ─▶ the supervisor was killed
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from infra.broker import stop_leftover
from infra.up.parent import SUPERVISOR_PID
from infra.up.pid_file import read_pids

DONE = b"done"
END_S = 10.0


class Guardian:
    """The supervisor's side: start() before anything else, dismiss() after everything ended."""

    def __init__(self, run_directory: Path, broker_directory: Path, lock: int) -> None:
        """`lock`: the run's lock, kept until the guardian has ended too."""
        command = [sys.executable, "-m", "infra.up.guardian"]
        facts = [str(os.getpid()), str(run_directory), str(broker_directory)]
        self._process = subprocess.Popen(
            [*command, *facts],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=(run_directory / "guardian.log").open("ab"),
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is not for it
        )

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(DONE)
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def guard(supervisor: int, run_directory: Path, broker_directory: Path) -> None:
    """Blocks until the supervisor ended, then ends what it left."""
    if sys.stdin.buffer.read() == DONE:
        return
    for name, pid in read_pids(run_directory).items():
        if _is_child_of(supervisor, pid):
            print(f"killing {name}, process {pid}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
    stop_leftover(broker_directory, lambda text: print(text, file=sys.stderr, flush=True))


def _is_child_of(supervisor: int, pid: int) -> bool:
    """Pids are used again; the environment says who started a process."""
    try:
        return psutil.Process(pid).environ().get(SUPERVISOR_PID) == str(supervisor)
    except psutil.Error:
        return False


if __name__ == "__main__":
    guard(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
