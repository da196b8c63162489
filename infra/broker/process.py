"""A broker's Java process, found by what its directory's record says of it."""

import signal
from contextlib import suppress

import psutil

from infra.broker.directory import Running

CREATED_TOLERANCE_S = 2.0  # the clock that create_time() is derived from may be adjusted


class BrokerProcess:
    """A Java process that runs a broker; our child, or one that an earlier run left."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def is_running(self) -> bool:
        """Reaps it when it is a dead child of ours."""
        try:
            if self._process.status() == psutil.STATUS_ZOMBIE:
                self._process.wait(timeout=0)
                return False
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            return False
        return self._process.is_running()

    def ask_to_stop(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def remove(self) -> None:
        """A process leaves nothing behind."""

    def _send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)


def find_process(running: Running) -> BrokerProcess | None:
    """The process with the recorded pid if it still is that broker: pids are used again."""
    if running.pid is None or running.created_s is None:
        return None
    try:
        process = psutil.Process(running.pid)
        is_it = abs(process.create_time() - running.created_s) <= CREATED_TOLERANCE_S
        return BrokerProcess(process) if is_it and "kafka.Kafka" in process.cmdline() else None
    except psutil.Error:
        return None
