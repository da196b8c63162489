"""`groupstream up`: broker, init, then every role until the run has finished.

lock ─▶ guardian ─▶ broker ─▶ init ─▶ roles, supervised ─▶ roles end ─▶ broker ─▶ guardian
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from infra.broker import Broker, start_broker
from infra.broker.errors import BrokerError
from infra.broker.ports import free_port
from infra.init import control_state, init_run
from infra.screen.screen import Screen
from infra.up.child import Child
from infra.up.guardian import Guardian
from infra.up.lock import only_one
from infra.up.quiet import stderr_to
from infra.up.roles import environment_of, roles_of
from infra.up.supervisor import Outcome, Supervisor
from schemas.config import Config
from schemas.config_file import load_config
from schemas.control import ControlLog
from schemas.errors import GroupstreamError, RunStopped
from schemas.topics import Topics

Note = Callable[[str], None]


class NoBroker(GroupstreamError):
    """No Kafka could be reached or started; the message has every way that was tried."""


@dataclass(frozen=True)
class Launch:
    """What the user asked for."""

    config_file: Path
    overrides: Sequence[str] = ()
    assemblers: int = 1


@dataclass(frozen=True)
class Session:
    """A run whose broker answers; `config` names it."""

    config: Config
    overrides: list[str]
    broker: Broker


def broker_directory(config: Config) -> Path:
    """The run's own broker keeps its data beside the run's weights."""
    return config.run_directory / "broker"


@contextmanager
def session(launch: Launch, note: Note) -> Iterator[Session]:
    """The run's lock, and a broker that answers: the given one or one of the run's own.

    On the way out our broker is stopped, also after a kill -9 of this process.
    Raises ConfigError when the run is up already, NoBroker.
    """
    config = load_config(launch.config_file, launch.overrides)
    place = broker_directory(config)
    with only_one(config.run_directory, note) as lock:
        guardian = Guardian(config.run_directory, place, lock)
        try:
            with _broker(config, place, note) as broker:
                given = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
                overrides = [*launch.overrides, given]
                yield Session(load_config(launch.config_file, overrides), overrides, broker)
        finally:
            guardian.dismiss()


def up(
    launch: Launch,
    console: Console,
    *,
    stop: threading.Event,
    hurry: threading.Event,
    inspect: Callable[[Session, Outcome], None] | None = None,
) -> Outcome:
    """Blocks until the run has finished, cannot go on, or `stop` is set; nothing runs then.

    `inspect` is called after the roles ended, while the broker still answers.
    Raises what session() and init_run() raise, and RunStopped for a run that is fatal already.
    """

    def note(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    started_s = time.monotonic()
    log = load_config(launch.config_file, launch.overrides).log_directory / "up.log"
    with stderr_to(log), session(launch, note) as running:
        note(f"run {running.config.run.id}: topics and manifest")
        init_run(running.config)
        _require_not_fatal(running.config, launch.config_file)
        if stop.is_set():
            return Outcome(finished=False, stopped=True, problem="", exit_codes={}, restarts={})
        outcome = _supervised(launch, running, console, started_s=started_s, stop=stop, hurry=hurry)
        if inspect is not None:
            inspect(running, outcome)
        note("stopping the broker" if running.broker.how != "given" else "leaving the broker")
    return outcome


def _supervised(
    launch: Launch,
    running: Session,
    console: Console,
    *,
    started_s: float,
    stop: threading.Event,
    hurry: threading.Event,
) -> Outcome:
    config = running.config
    config.log_directory.mkdir(parents=True, exist_ok=True)
    roles = roles_of(
        config,
        launch.config_file,
        running.overrides,
        launch.assemblers,
        port=free_port(),
    )
    shards = sum(shard.replicas for shard in config.all_shards.values())
    environment = environment_of(os.environ, shards + 1, os.cpu_count() or 1)
    children = [Child(role, config.log_directory, environment) for role in roles]
    control = ControlLog(config.kafka, Topics(config.run.id), f"{config.run.id}.up")
    try:
        control.read_to_end()
        with Screen(config, console, started_s) as screen:
            return Supervisor(
                config=config,
                children=children,
                control=control,
                screen=screen,
                broker=running.broker,
                stop=stop,
                hurry=hurry,
            ).run()
    finally:
        control.close()


def _require_not_fatal(config: Config, config_file: Path) -> None:
    try:
        control_state(config).raise_if_fatal()
    except RunStopped as error:
        raise RunStopped(
            f"{error}\nWhen the cause is gone: groupstream resume --config {config_file}"
        ) from error


@contextmanager
def _broker(config: Config, place: Path, note: Note) -> Iterator[Broker]:
    """Raises NoBroker."""
    kafka = config.kafka
    try:
        broker = start_broker(
            place,
            bootstrap_servers=kafka.bootstrap_servers,
            record_bytes=max(kafka.max_row_bytes, kafka.max_group_bytes),
            progress=note,
        )
    except BrokerError as error:
        raise NoBroker(str(error)) from error
    with broker:
        yield broker
