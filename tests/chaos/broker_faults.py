"""The broker killed, or its disk full: in a thread of its own, because both take seconds."""

import threading
import time
from collections.abc import Callable

from infra.broker import Broker
from tests.chaos.small_disk import SmallDisk

DIES_WITHIN_S = 30.0  # of a full disk
LOOKS_EVERY_S = 0.1


class BrokerFaults:
    """One fault at a time: join() before the next. `died_of_disk`: how often it really did."""

    def __init__(self, broker: Broker, disk: SmallDisk | None) -> None:
        self.died_of_disk = 0
        self._broker, self._disk = broker, disk
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def restart(self) -> None:
        """kill -9, and started again at once."""
        self._begin(self._broker.kill, self._broker.restart)

    def fill_disk(self, full_s: float) -> None:
        """It stays full for `full_s` after the broker died; then it is started again."""
        self._begin(lambda: self._die_of_disk(full_s), self._broker.restart)

    def join(self, deadline_s: float) -> None:
        """Raises what the thread raised."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, *steps: Callable[[], object]) -> None:
        assert not self.is_at_work

        def take() -> None:
            try:
                for step in steps:
                    step()
            except BaseException as error:  # raised where it is joined
                self._error = error

        self._thread = threading.Thread(target=take, name="broker", daemon=True)
        self._thread.start()

    def _die_of_disk(self, full_s: float) -> None:
        assert self._disk is not None, "such a fault is only in the schedule where there is a disk"
        until_s = time.monotonic() + DIES_WITHIN_S
        try:
            while self._broker.is_running() and time.monotonic() < until_s:
                self._disk.fill()  # again: what it deletes meanwhile makes room
                time.sleep(LOOKS_EVERY_S)
            self.died_of_disk += not self._broker.is_running()
            time.sleep(full_s)
            self._broker.kill()
        finally:
            self._disk.empty()
