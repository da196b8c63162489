"""The roles as processes: killed, stopped and continued on demand, started again when they end."""

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from infra.cli.exit_codes import ExitCode
from infra.up.child import Child
from infra.up.policy import said
from infra.up.roles import RoleProcess

DIES_WITHIN_S = 20.0
RESTART_S = 0.5  # after an end of its own
TELLS_WITHIN_S = 1.0
PERSON_MUST_ACT = (ExitCode.REFUSED, ExitCode.USAGE)


class RoleGaveUp(Exception):
    """A role ended and says that starting it again is of no use; the message has its last words."""


class Roles:
    """One thread: the children end with the thread that started them.

    `exits`: how each role ended when nobody had killed it, by how often. `last_words`: the end of
    the log of each that failed with an error that nobody expected; `crashes`: of each that died of
    a signal, as C code does.
    """

    def __init__(
        self, roles: Iterable[RoleProcess], child_of: Callable[[RoleProcess], Child]
    ) -> None:
        """`child_of` makes a process of a role, not started yet."""
        self._child_of = child_of
        self._children = {role.name: child_of(role) for role in roles}
        self._stopped: dict[str, int] = {}
        self._replaced: dict[str, list[Child]] = defaultdict(list)
        self._due_s: dict[str, float] = {}
        self._done: set[str] = set()
        self.exits: dict[str, Counter[str]] = defaultdict(Counter)
        self.last_words: list[str] = []
        self.crashes: list[str] = []

    @property
    def done(self) -> bool:
        return not self.unfinished

    @property
    def unfinished(self) -> list[str]:
        """The names of those that run or shall run again; of a replaced one too."""
        replaced = [name for name, firsts in self._replaced.items() if firsts]
        return [name for name in self._children if name not in self._done] + replaced

    def start(self) -> None:
        for child in self._children.values():
            child.start()

    def kill(self, name: str) -> None:
        """SIGKILL, then started again at once. Nothing for one that has finished."""
        child = self._children[name]
        if name in self._done:
            return
        if self._stopped.get(name) == child.pid:
            del self._stopped[name]
        child.kill()
        until_s = time.monotonic() + DIES_WITHIN_S
        while not child.has_ended():
            if time.monotonic() > until_s:
                raise RoleGaveUp(f"{name} is still there {DIES_WITHIN_S:.0f} s after SIGKILL")
            time.sleep(0.005)
        self._due_s.pop(name, None)
        child.start()

    def replace(self, name: str) -> bool:
        """stop(), and a second process of the same role; go_on() wakes the first."""
        first = self._children[name]
        if not self.stop(name):
            return False
        second = self._child_of(first.role)
        self._children[name] = second
        self._replaced[name].append(first)
        second.start()
        return True

    def restart_with(self, name: str, override: str) -> None:
        """kill(), with one more value of the configuration."""
        child = self._children[name]
        child.role = replace(child.role, command=[*child.role.command, override])
        self.kill(name)

    def stop(self, name: str) -> bool:
        """SIGSTOP. False where it does not run."""
        child = self._children[name]
        if child.has_ended() or child.pid is None:
            return False
        os.kill(child.pid, signal.SIGSTOP)
        self._stopped[name] = child.pid
        return True

    def go_on(self, name: str) -> None:
        """SIGCONT, if the process that was stopped is still there."""
        pid = self._stopped.pop(name, None)
        if pid is not None and pid in [each.pid for each in self._all_of(name)]:
            os.kill(pid, signal.SIGCONT)

    def go_on_all(self) -> None:
        for name in list(self._stopped):
            self.go_on(name)

    def stacks(self) -> str:
        """What every thread of every process that runs does now; their logs have it too."""
        told = []
        for child in self._everyone():
            if child.has_ended() or child.pid is None:
                continue
            before = child.log_path.stat().st_size
            os.kill(child.pid, signal.SIGUSR1)
            time.sleep(TELLS_WITHIN_S)
            with child.log_path.open("rb") as log:
                log.seek(before)
                stack = log.read().decode(errors="replace").rstrip()
            told.append(f"{child.role.name} (pid {child.pid}):\n{stack}")
        return "\n".join(told)

    def attend(self, *, finished: bool) -> None:
        """Starts again who ended by itself. Raises RoleGaveUp."""
        for name, child in self._children.items():
            if name in self._done:
                continue
            due_s = self._due_s.get(name)
            if due_s is not None:
                if time.monotonic() >= due_s:
                    del self._due_s[name]
                    child.start()
            elif child.has_ended() and child.returncode is not None:
                self._judge(name, child, child.returncode, finished=finished)
        for name, firsts in self._replaced.items():
            for first in [each for each in firsts if each.has_ended()]:
                firsts.remove(first)
                self.exits[name][f"{said(int(first.returncode or 0))} (had a successor)"] += 1

    def _judge(self, name: str, child: Child, returncode: int, *, finished: bool) -> None:
        if returncode == ExitCode.DONE and finished:
            self._done.add(name)
            return
        self.exits[name][said(returncode)] += 1
        if returncode in PERSON_MUST_ACT:
            raise RoleGaveUp(f"{name} {said(returncode)}:\n{child.last_lines()}")
        if returncode < 0:  # not by us: kill() starts it again itself
            self.crashes.append(f"{name} {said(returncode)}:\n{child.last_lines(40)}")
        if returncode == ExitCode.FAILED:
            self.last_words.append(f"{name} {said(returncode)}:\n{child.last_lines(40)}")
        self._due_s[name] = time.monotonic() + RESTART_S

    def end(self) -> None:
        """SIGKILL to all that is left."""
        everyone = self._everyone()
        for child in everyone:
            child.kill()
        until_s = time.monotonic() + DIES_WITHIN_S
        while [child for child in everyone if not child.has_ended()]:
            if time.monotonic() > until_s:
                return
            time.sleep(0.01)

    def _everyone(self) -> list[Child]:
        return [each for name in self._children for each in self._all_of(name)]

    def _all_of(self, name: str) -> list[Child]:
        return [self._children[name], *self._replaced[name]]
