"""One chaos run: starts the roles, carries out the schedule, ends the data, waits for the end.

start ─▶ first steps are trained ─▶ faults, each at its time ─▶ all undone, data ended ─▶ drained
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from infra.status_log import StatusLog
from schemas.config import Config
from schemas.control import ControlLog
from schemas.records import Heartbeat
from schemas.status import now_ms
from schemas.topics import Topics
from tests.chaos.broker_faults import BrokerFaults
from tests.chaos.clocks import Clocks
from tests.chaos.deeds import Deeds
from tests.chaos.network import Network
from tests.chaos.processes import RoleGaveUp, Roles
from tests.chaos.schedule import Action, Fault

TURN_S = 0.02
SAY_S = 5.0
BEGIN_S = 180.0  # a busy machine starts six processes
DRAIN_S = 180.0
STEP_DRAIN_S = 3.0  # more, for each step of a fixed number that is left
BROKER_BACK_S = 240.0
MORE_STEPS = 4  # trained after the schedule's end, beyond what is dispatched ahead
STATUS_S = 5.0

Say = Callable[[str], None]


class NotDrained(Exception):
    """The run did not end in time; the message says what it waits for."""


@dataclass(frozen=True)
class World:
    """What the faults are done to."""

    roles: Roles
    broker: BrokerFaults
    network: Network
    clocks: Clocks


class Driver:
    """One thread, but for the broker's faults."""

    def __init__(self, config: Config, world: World, *, deeds: Deeds, say: Say) -> None:
        self._config, self._world = config, world
        self._roles, self._deeds, self._say = world.roles, deeds, say
        self._control = ControlLog(config.kafka, Topics(config.run.id), f"{config.run.id}.chaos")
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._began_s = time.monotonic()
        self._said_s = 0.0

    def run(self, faults: Sequence[Fault], *, seconds: float, steps: int) -> None:
        """Blocks until every role has ended by itself. Raises NotDrained, RoleGaveUp.

        `steps`: how many the data is for; 0: it ends when the schedule does.
        """
        self._roles.start()
        self._until(lambda: self._version >= 1, BEGIN_S, "its first step")
        self._began_s = time.monotonic()
        for fault in faults:
            if self._wait_until(fault.at_s):
                self._carry_out(fault)
        self._wait_until(seconds)
        self._finish_faults()
        if steps == 0:
            self._end_the_data()
        left = max(0, steps - self._version)
        self._say(f"the schedule is over at version {self._version}: the run drains")
        self._until(lambda: self._roles.done, DRAIN_S + STEP_DRAIN_S * left, "its end")

    def close(self) -> None:
        self._control.close()
        self._world.broker.join(BROKER_BACK_S)

    @property
    def _version(self) -> int:
        return self._control.state.highest_version

    @property
    def _finished(self) -> bool:
        return self._control.state.finished is not None

    def _wait_until(self, at_s: float) -> bool:
        """Since the schedule's begin; False where the run finished before."""
        while time.monotonic() - self._began_s < at_s and not self._finished:
            self._turn()
        return not self._finished

    def _carry_out(self, fault: Fault) -> None:
        if fault.action in (Action.BROKER, Action.DISK):
            self._await_broker()
        self._deeds.note(fault.action, fault.role, fault.for_s, fault.shift_s)
        match fault.action:
            case Action.KILL:
                self._roles.kill(fault.role)
            case Action.STOP:
                self._roles.stop(fault.role)
                self._undo_later(fault, lambda: self._roles.go_on(fault.role))
            case Action.REPLACE:
                self._roles.replace(fault.role)
                self._undo_later(fault, lambda: self._roles.go_on(fault.role))
            case Action.CUT | Action.FREEZE:
                self._world.network.lose(fault.role, fault.action)
                self._undo_later(fault, lambda: self._world.network.heal(fault.role))
            case Action.CLOCK:
                self._world.clocks.jump(fault.role, fault.shift_s)
            case Action.BROKER:
                self._world.broker.restart()
            case Action.DISK:
                self._world.broker.fill_disk(fault.for_s)

    def _undo_later(self, fault: Fault, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + fault.for_s, undo))

    def _await_broker(self) -> None:
        until_s = time.monotonic() + BROKER_BACK_S
        while self._world.broker.is_at_work:
            if time.monotonic() > until_s:
                raise NotDrained(f"the broker was not back after {BROKER_BACK_S:.0f} s")
            self._turn()
        self._world.broker.join(BROKER_BACK_S)

    def _finish_faults(self) -> None:
        """Nothing is stopped, cut off or away any more; clocks stay wrong."""
        while self._undo and not self._finished:
            self._turn()
        for _, undo in self._undo:
            undo()
        self._undo = []
        self._await_broker()

    def _end_the_data(self) -> None:
        """The dispatcher is killed once more, and comes back with a last step not far away."""
        last = self._version + self._config.grpo.lead + MORE_STEPS
        self._deeds.note(Action.KILL, "dispatcher")
        self._roles.restart_with("dispatcher", f"grpo.max_num_steps={last}")

    def _until(self, reached: Callable[[], bool], deadline_s: float, what: str) -> None:
        until_s = time.monotonic() + deadline_s
        while not reached():
            if time.monotonic() > until_s:
                raise NotDrained(
                    f"the run did not reach {what} within {deadline_s:.0f} s. It is at version "
                    f"{self._version}, finished: {self._finished}; of its roles "
                    f"{self._roles.unfinished} have not ended:\n{self._waits()}\n"
                    f"{self._roles.stacks()}"
                )
            self._turn()

    def _turn(self) -> None:
        self._control.poll(TURN_S)
        fatal = self._control.state.fatal
        if fatal is not None:
            raise RoleGaveUp(f"the {fatal.role} stopped the run: {fatal.message}")
        now_s = time.monotonic()
        due = [undo for due_s, undo in self._undo if due_s <= now_s]
        self._undo = [(due_s, undo) for due_s, undo in self._undo if due_s > now_s]
        for undo in due:
            undo()
        self._roles.attend(finished=self._finished)
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            done = ", ".join(f"{n} {kind}" for kind, n in self._deeds.counts.items() if n)
            self._say(f"{now_s - self._began_s:4.0f} s: version {self._version}; {done}")

    def _waits(self) -> str:
        """The newest heartbeat of every process, one a line."""
        newest: dict[str, Heartbeat] = {}
        topics = Topics(self._config.run.id)
        log = StatusLog(self._config.kafka, topics, f"{self._config.run.id}.chaos")
        with closing(log):
            until_s = time.monotonic() + STATUS_S
            while time.monotonic() < until_s:
                for beat in log.poll(0.5):
                    newest[f"{beat.role}/{beat.instance}"] = beat
        return "\n".join(
            f"  {name}: {beat.doing} (for {(now_ms() - beat.doing_since_ms) / 1000:.0f} s, "
            f"heard {(now_ms() - beat.at_ms) / 1000:.0f} s ago)"
            for name, beat in sorted(newest.items())
        )
