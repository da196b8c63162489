"""A broker that groupstream uses: one that was given, or one of our own on this machine.

start() ── prepare, write the record, wait until it answers
stop()  ── SIGTERM, wait, SIGKILL after the deadline     kill() ── SIGKILL at once
restart() after any of them: the same ports, the same data
"""

from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from infra.broker.answering import Questioner
from infra.broker.directory import BrokerDirectory, Running
from infra.broker.errors import AttemptFailed, NotOurBroker, WaitTimedOut
from infra.broker.waiting import Progress, last_lines, wait_until

How = Literal["given", "docker", "java"]

ANSWER_S = 180.0  # a start takes about 5 s on an idle machine, 45 s was seen on a busy one
STOP_S = 30.0
KILL_S = 10.0


class Broker(Protocol):
    """What start_broker() returns. As a context manager it stops itself."""

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def how(self) -> How: ...

    @property
    def log_path(self) -> Path | None:
        """The broker's own log; None for a given one."""
        ...

    @property
    def pid(self) -> int | None:
        """Of the Java process while it should run; None for a given one or a container."""
        ...

    @property
    def container(self) -> str | None:
        """The container's id while it should run; None without one."""
        ...

    def is_running(self) -> bool:
        """Whether its process or container is there; a given one counts as running."""
        ...

    def stop(self) -> None:
        """In order, within STOP_S + KILL_S seconds; again is no error. Leaves a given one alone."""
        ...

    def kill(self) -> None:
        """SIGKILL, as a crash would. Raises NotOurBroker for a given one."""
        ...

    def restart(self) -> None:
        """Stops it if it runs, starts it on the same ports and data. Raises NotOurBroker."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Server(Protocol):
    """A started broker, whatever runs it."""

    def is_running(self) -> bool: ...

    def ask_to_stop(self) -> None:
        """Returns at once; no error when it has ended."""
        ...

    def kill(self) -> None:
        """Returns at once; no error when it has ended."""
        ...

    def remove(self) -> None:
        """Takes away what an ended one leaves."""
        ...


class Starter(Protocol):
    """A way to run brokers in one directory."""

    @property
    def how(self) -> How: ...

    def prepare(self, progress: Progress) -> None:
        """Formats an empty data directory. Raises AttemptFailed."""
        ...

    def start(self, running: Running) -> tuple[Running, Server]:
        """Starts it on the ports of `running`; does not wait. Raises AttemptFailed."""
        ...


class GivenBroker:
    """A cluster that somebody else runs."""

    how: How = "given"
    log_path = None
    pid = None
    container = None

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def is_running(self) -> bool:
        return True

    def stop(self) -> None:
        """Leaves it alone."""

    def kill(self) -> None:
        raise NotOurBroker(f"{self.bootstrap_servers} was given, so it is not ours to kill")

    def restart(self) -> None:
        raise NotOurBroker(f"{self.bootstrap_servers} was given, so it is not ours to restart")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalBroker:
    """A broker of our own, listening on 127.0.0.1 alone."""

    def __init__(
        self,
        directory: BrokerDirectory,
        starter: Starter,
        running: Running,
        server: Server | None,
        progress: Progress,
    ) -> None:
        """`server` is one that runs already; None: start() comes next."""
        self._directory, self._starter, self._progress = directory, starter, progress
        self._running, self._server = running, server

    @property
    def how(self) -> How:
        return self._starter.how

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._running.port}"

    @property
    def log_path(self) -> Path:
        return self._directory.log

    @property
    def pid(self) -> int | None:
        return self._running.pid

    @property
    def container(self) -> str | None:
        return self._running.container

    def is_running(self) -> bool:
        return self._server is not None and self._server.is_running()

    def start(self) -> None:
        """Raises AttemptFailed, with the log's end, when it ends or does not answer in time."""
        if not self._directory.is_formatted:
            self._starter.prepare(self._progress)
        self._running, self._server = self._starter.start(self._running)
        try:
            self._directory.write_running(self._running)  # first: a crash now must not lose it
            self.wait_until_it_answers()
        except BaseException:
            self.kill()
            raise

    def wait_until_it_answers(self) -> None:
        """Raises AttemptFailed as start() does."""
        questioner = Questioner(self.bootstrap_servers)

        def answers_or_ended() -> bool:
            return not self.is_running() or questioner.answers(ask_s=0.5)

        try:
            wait_until(
                answers_or_ended,
                f"waiting for the broker at {self.bootstrap_servers} to answer",
                ANSWER_S,
                self._progress,
            )
        except WaitTimedOut as error:
            raise self._failed(f"{error} ({questioner.last_answer})") from error
        if not self.is_running():
            raise self._failed("the broker ended while it started")

    def stop(self) -> None:
        if self._server is not None:
            end(self._server, self._progress)
            self._forget()

    def kill(self) -> None:
        """Raises WaitTimedOut when it is still there after KILL_S."""
        if self._server is not None:
            end_at_once(self._server, self._progress)
            self._forget()

    def restart(self) -> None:
        """Raises AttemptFailed when it does not come back."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _forget(self) -> None:
        """It has ended: the record keeps only the ports, for the next start."""
        self._server = None
        self._running = self._running.ended()
        self._directory.write_running(self._running)

    def _failed(self, what: str) -> AttemptFailed:
        return AttemptFailed(
            f"{what}; its log ends: {last_lines(self.log_path)}", f"look into {self.log_path}"
        )


def end(server: Server, progress: Progress) -> None:
    """SIGTERM, then SIGKILL after STOP_S. Raises WaitTimedOut when even that does not end it."""
    server.ask_to_stop()
    try:
        wait_until(lambda: not server.is_running(), "stopping the broker", STOP_S, progress)
    except WaitTimedOut:
        progress(f"the broker did not stop within {STOP_S:g} s: killing it")
        end_at_once(server, progress)
    else:
        server.remove()


def end_at_once(server: Server, progress: Progress) -> None:
    """SIGKILL. Raises WaitTimedOut when it is still there after KILL_S."""
    server.kill()
    wait_until(lambda: not server.is_running(), "killing the broker", KILL_S, progress)
    server.remove()
