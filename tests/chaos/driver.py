"""One chaos run: starts the roles, carries out the schedule, ends the data, waits for the end.

start ─▶ first steps are trained ─▶ faults, each at its time ─▶ all continued, data ended ─▶ drained
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import orjson

from infra.broker import Broker
from infra.status_log import StatusLog
from schemas.config import Config
from schemas.control import ControlLog
from schemas.records import Heartbeat
from schemas.status import now_ms
from schemas.topics import Topics
from tests.chaos.processes import RoleGaveUp, Roles
from tests.chaos.schedule import Action, Fault

TURN_S = 0.02
SAY_S = 5.0
BEGIN_S = 180.0  # a busy machine starts six processes
DRAIN_S = 180.0
STEP_DRAIN_S = 1.0  # more, for each step of a fixed number that is left
BROKER_BACK_S = 240.0
MORE_STEPS = 4  # trained after the schedule's end, beyond what is dispatched ahead
STATUS_S = 5.0

Say = Callable[[str], None]


class NotDrained(Exception):
    """The run did not end in time; the message says what it waits for."""


@dataclass
class Deeds:
    """What was done to the run."""

    kills_ms: list[int] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    broker_restarts: int = 0


class Driver:
    """One thread, but for the broker's restart, which takes seconds."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        broker: Broker,
        *,
        deeds: Deeds,
        say: Say,
    ) -> None:
        """`deeds` are counted as they are done; faults.jsonl of the run gets a line for each."""
        self.deeds = deeds
        self._config, self._roles, self._broker = config, roles, broker
        self._journal, self._say = config.run_directory / "faults.jsonl", say
        self._control = ControlLog(config.kafka, Topics(config.run.id), f"{config.run.id}.chaos")
        self._continue_s: dict[str, float] = {}
        self._restart: threading.Thread | None = None
        self._restart_error: BaseException | None = None
        self._began_s = time.monotonic()
        self._said_s = 0.0

    def run(self, faults: Sequence[Fault], *, seconds: float, steps: int) -> None:
        """Blocks until every role has ended by itself. Raises NotDrained, RoleGaveUp."""
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
        if self._restart is not None:
            self._restart.join(BROKER_BACK_S)
        self._control.close()

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
        self._note(fault.action, fault.role, fault.for_s)
        match fault.action:
            case Action.KILL:
                self._kill(fault.role)
            case Action.STOP:
                self._stop(fault, self._roles.stop)
            case Action.REPLACE:
                self._stop(fault, self._roles.replace)
            case Action.BROKER:
                self._restart_broker()

    def _kill(self, role: str, override: str | None = None) -> None:
        self.deeds.kills += 1
        self.deeds.kills_ms.append(now_ms())
        if override is None:
            self._roles.kill(role)
        else:
            self._roles.restart_with(role, override)

    def _stop(self, fault: Fault, stop: Callable[[str], bool]) -> None:
        if stop(fault.role):
            self.deeds.stops += 1
            self._continue_s[fault.role] = time.monotonic() + fault.for_s

    def _restart_broker(self) -> None:
        self._join_restart()
        self.deeds.broker_restarts += 1
        self.deeds.kills_ms.append(now_ms())
        self._restart = threading.Thread(target=self._kill_broker, name="broker", daemon=True)
        self._restart.start()

    def _kill_broker(self) -> None:
        try:
            self._broker.kill()
            self._broker.restart()
        except BaseException as error:  # raised where it is joined
            self._restart_error = error

    def _join_restart(self) -> None:
        if self._restart is None:
            return
        until_s = time.monotonic() + BROKER_BACK_S
        while self._restart.is_alive() and time.monotonic() < until_s:
            self._turn()
        if self._restart.is_alive():
            raise NotDrained(f"the broker was not back {BROKER_BACK_S:.0f} s after it was killed")
        self._restart = None
        if self._restart_error is not None:
            raise self._restart_error

    def _finish_faults(self) -> None:
        """Nothing is stopped or away any more."""
        while self._continue_s and not self._finished:
            self._turn()
        self._roles.go_on_all()
        self._join_restart()

    def _end_the_data(self) -> None:
        """The dispatcher is killed once more, and comes back with a last step not far away."""
        last = self._version + self._config.grpo.lead + MORE_STEPS
        self._note(Action.KILL, "dispatcher", 0.0)
        self._kill("dispatcher", f"grpo.max_num_steps={last}")

    def _until(self, reached: Callable[[], bool], deadline_s: float, what: str) -> None:
        until_s = time.monotonic() + deadline_s
        while not reached():
            if time.monotonic() > until_s:
                raise NotDrained(
                    f"the run did not reach {what} within {deadline_s:.0f} s. It is at version "
                    f"{self._version}, finished: {self._finished}; of its roles "
                    f"{self._roles.unfinished} have not ended:\n" + self._waits()
                )
            self._turn()

    def _turn(self) -> None:
        self._control.poll(TURN_S)
        fatal = self._control.state.fatal
        if fatal is not None:
            raise RoleGaveUp(f"the {fatal.role} stopped the run: {fatal.message}")
        now_s = time.monotonic()
        for role, due_s in list(self._continue_s.items()):
            if now_s >= due_s:
                del self._continue_s[role]
                self._roles.go_on(role)
        self._roles.attend(finished=self._finished)
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            deeds = self.deeds
            self._say(
                f"{now_s - self._began_s:4.0f} s: version {self._version}, {deeds.kills} kills, "
                f"{deeds.stops} stops, {deeds.broker_restarts} broker restarts"
            )

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

    def _note(self, action: Action, role: str, for_s: float) -> None:
        """A line of the journal: what was done when, by the wall clock of the logs."""
        at_s = round(time.monotonic() - self._began_s, 3)
        deed = {"at_ms": now_ms(), "at_s": at_s, "action": action, "role": role, "for_s": for_s}
        with self._journal.open("ab") as file:
            file.write(orjson.dumps(deed, option=orjson.OPT_APPEND_NEWLINE))
