"""Keeps every role of the run alive until it has finished.

start all ─▶ turn, 20 times a second: follow `control`, judge who ended, restart who is due, draw
             ├─ all done ─▶ finished          ├─ `fatal` on control, or a Stop verdict ─▶ stop all
             └─ Ctrl-C ─▶ stop all in order   └─ finished, but a role stays ─▶ stop it
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from infra.broker import Broker
from infra.screen.screen import Screen
from infra.screen.view import Process
from infra.up.child import Child
from infra.up.pid_file import write_pids
from infra.up.policy import Done, Restart, Stop, Supervision, said
from infra.up.stopping import stop_in_order
from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import DeadlineExceeded

TURN_S = 0.05
LAST_WORDS_S = 20.0  # roles end by themselves within seconds of `fatal`
FINISH_S = 120.0  # after `finished` each role ends its clients; the trainer may still write
BROKER_CHECK_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How it ended. `problem` is empty for a finished run and for one that was asked to stop."""

    finished: bool
    stopped: bool
    problem: str
    exit_codes: dict[str, int]
    restarts: dict[str, int]


class Supervisor:
    """One thread: the children's parent, by which Linux ends them when it ends."""

    def __init__(
        self,
        *,
        config: Config,
        children: Sequence[Child],
        control: ControlLog,
        screen: Screen,
        broker: Broker,
        stop: threading.Event,
        hurry: threading.Event,
    ) -> None:
        """`stop`: the user wants to end; `hurry`: at once."""
        self._config, self._children, self._control = config, children, control
        self._screen, self._broker, self._stop, self._hurry = screen, broker, stop, hurry
        self._supervision = Supervision()
        self._due_s: dict[str, float] = {}
        self._done: set[str] = set()
        self._problem = ""
        self._broker_checked_s = time.monotonic()

    def run(self) -> Outcome:
        """Blocks until no role runs any more."""
        try:
            for child in self._children:
                child.start()
            self._publish_pids()
            self._until_over()
        finally:
            if self._stop.is_set():
                self._note("stopping in order; Ctrl-C again stops at once")
            stop_in_order(self._children, self._hurry.is_set, self._draw, self._note)
            self._publish_pids()
        self._screen.update(self._control.state, self._processes, now=True)
        finished = len(self._done) == len(self._children)
        return Outcome(
            finished=finished,
            stopped=self._stop.is_set() and not self._problem,
            problem=self._problem or self._lingering(finished),
            exit_codes={c.role.name: int(c.returncode or 0) for c in self._children},
            restarts={c.role.name: c.starts - 1 for c in self._children if c.starts > 1},
        )

    def _until_over(self) -> None:
        over_s: float | None = None
        while not self._stop.is_set() and len(self._done) < len(self._children):
            self._control.poll(0)
            state = self._control.state
            for child in self._children:
                self._attend(child)
            if state.fatal is not None:
                self._problem = f"the {state.fatal.role} stopped the run: {state.fatal.message}"
            if over_s is None and (self._problem or state.finished):
                over_s = time.monotonic() + (LAST_WORDS_S if self._problem else FINISH_S)
            if self._problem and state.fatal is None:
                return  # nobody else knows of it: they are asked to stop
            if over_s is not None and (time.monotonic() > over_s or self._silenced()):
                return
            self._check_broker()
            self._draw()
            time.sleep(TURN_S)

    def _attend(self, child: Child) -> None:
        """Restarts it when it is due, judges it when it has ended."""
        name = child.role.name
        if name in self._done:
            return
        due_s = self._due_s.get(name)
        if due_s is not None:
            if time.monotonic() >= due_s and not self._problem and not self._control.state.fatal:
                del self._due_s[name]
                child.start()
                self._publish_pids()
            return
        if child.has_ended() and child.returncode is not None:
            self._judge(child, child.returncode)

    def _judge(self, child: Child, returncode: int) -> None:
        self._refresh_control()
        finished = self._control.state.finished is not None
        name = child.role.name
        self._publish_pids()
        verdict = self._supervision.judge(name, returncode, child.lived_s, finished=finished)
        match verdict:
            case Done():
                self._done.add(name)
            case Restart(delay_s, why):
                self._due_s[name] = time.monotonic() + delay_s
                self._note(f"{name} {why}: it starts again in {delay_s:g} s")
            case Stop(why):
                self._due_s[name] = float("inf")
                if self._control.state.fatal is None:
                    self._problem = f"{why}. {child.log_path} ends:\n{child.last_lines()}"

    def _refresh_control(self) -> None:
        """What an ended role has read, we read: `finished` or `fatal` may be a moment old."""
        try:
            self._control.read_to_end(deadline_s=10.0)
        except DeadlineExceeded as error:
            log.warning("%s", error)

    def _check_broker(self) -> None:
        """Our own broker is started again where its process is gone."""
        if time.monotonic() - self._broker_checked_s < BROKER_CHECK_S:
            return
        self._broker_checked_s = time.monotonic()
        pid = self._broker.pid
        if pid is not None and not _runs(pid):
            self._note("the broker was killed: it starts again")
            self._broker.restart()
            self._publish_pids()

    def _silenced(self) -> bool:
        """After `fatal` nothing is restarted, so all ended is the end."""
        return bool(self._problem) and all(child.has_ended() for child in self._children)

    def _lingering(self, finished: bool) -> str:
        if finished or self._stop.is_set():
            return ""
        names = [c.role.name for c in self._children if c.role.name not in self._done]
        codes = {c.role.name: said(int(c.returncode or 0)) for c in self._children}
        told = ", ".join(f"{name} {codes[name]}" for name in names)
        return f"the run finished, but not every role ended by itself in order: {told}"

    def _processes(self) -> list[Process]:
        return [
            Process(c.role.name, c.role.key, self._state_of(c), max(0, c.starts - 1), c.lived_s)
            for c in self._children
        ]

    def _state_of(self, child: Child) -> str:
        if child.pid is not None:
            return "running"
        due_s = self._due_s.get(child.role.name)
        if due_s is not None and due_s != float("inf"):
            return f"restarting in {max(0.0, due_s - time.monotonic()):.0f} s"
        return f"exit code {child.returncode}"

    def _publish_pids(self) -> None:
        pids = {c.role.name: c.pid for c in self._children if c.pid is not None}
        pids["up"] = os.getpid()
        if self._broker.pid is not None:
            pids["broker"] = self._broker.pid
        write_pids(self._config.run_directory, pids)

    def _draw(self) -> None:
        self._screen.update(self._control.state, self._processes)

    def _note(self, text: str) -> None:
        log.info("%s", text)
        self._screen.note(text)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
