"""python -m tests.chaos [PROFILE] [seed=7] [seconds=60] [mode=mixed] ...: see tests.chaos.settings

Exit code 0: everything that was dispatched is accounted for exactly once. 1: it is not, and the
run's directory, build/chaos/<seed>, has the logs.
"""

import shutil
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from confluent_kafka import KafkaException
from rich.console import Console

from infra.broker import BrokerError, start_broker, stop_leftover
from infra.broker.ports import free_port
from infra.init import init_run
from infra.up.quiet import stderr_to
from schemas.errors import GroupstreamError
from tests.chaos.auditor import examine
from tests.chaos.broker_faults import BrokerFaults
from tests.chaos.children import Surroundings, roles_under_test
from tests.chaos.clocks import Clocks
from tests.chaos.deeds import Deeds
from tests.chaos.driver import Driver, NotDrained, World
from tests.chaos.gym import script_of
from tests.chaos.network import Network
from tests.chaos.processes import RoleGaveUp, Roles
from tests.chaos.run_files import GROUP_BYTES, shorten_sessions, write_run
from tests.chaos.schedule import MODES, Plan, make_schedule
from tests.chaos.settings import BadSetting, Settings
from tests.chaos.small_disk import NoDisk, SmallDisk, unmount

BUILD = Path("build")
HEAP = ("256m", "512m")

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text, markup=False)


def main(arguments: list[str]) -> int:
    try:
        settings = Settings.parsed(arguments)
    except BadSetting as error:
        sys.exit(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the way out ends what we started
    directory = BUILD / "chaos" / str(settings.seed)
    stop_leftover(directory / "broker", say)
    unmount(directory / "broker" / "data")
    shutil.rmtree(directory, ignore_errors=True)
    with stderr_to(directory / "driver.log"):  # what the clients say of a broker that is away
        problems = run(settings, directory)
        if not problems:
            shutil.rmtree(directory)
    if not problems:
        say("everything is accounted for exactly once")
        return 0
    say("FAILED:")
    for problem in problems:
        say(f"- {problem}")
    say(f"seed {settings.seed} failed; again: {settings.replay}\nlogs: {directory}")
    return 1


def run(settings: Settings, directory: Path) -> list[str]:
    """What went wrong, one sentence each; build/chaos.json has the sums."""
    port = free_port()
    config, file = write_run(settings, f"127.0.0.1:{port}", directory)
    processes = roles_under_test(config, file, settings.assemblers)
    names = [role.name for role in processes]
    with ExitStack() as stack:
        disk, no_disk = disk_of(stack, settings, directory / "broker" / "data")
        network = stack.enter_context(Network(names))
        broker = stack.enter_context(
            start_broker(
                directory / "broker",
                record_bytes=GROUP_BYTES,
                port=port,
                heap=HEAP,
                proxied=network.proxied,
                progress=say,
            )
        )
        init_run(config)
        if settings.protocol == "consumer":
            shorten_sessions(config)
        config.run_directory.mkdir(parents=True, exist_ok=True)
        clocks = Clocks(directory / "clocks", names)
        surroundings = Surroundings(config.log_directory, network, clocks, settings.step_s)
        roles = Roles(map(surroundings.behind_proxy, processes), surroundings)
        deeds = Deeds(config.run_directory / "faults.jsonl")
        world = World(roles, BrokerFaults(broker, disk), network, clocks)
        driver = Driver(config, world, deeds=deeds, say=say)
        problems = drive(driver, roles, settings, names, disk=disk is not None)
        problems += roles.crashes + roles.last_words
        figures = asdict(settings) | {
            "no_disk_faults": no_disk,
            "faults": deeds.counts,
            "died_of_full_disk": world.broker.died_of_disk,
        }
        try:
            findings = examine(config, deeds.done, partial(script_of, settings.seed))
        except (GroupstreamError, KafkaException) as error:
            problems.append(f"the audit ended: {error}")
        else:
            figures |= findings.sums
            problems += findings.problems
    write_sums(figures | {"problems": problems, "replay": settings.replay}, roles)
    return problems


def disk_of(
    stack: ExitStack, settings: Settings, path: Path
) -> tuple[SmallDisk | None, str | None]:
    """The disk for the broker's data, or why there is none."""
    if MODES[settings.mode].disk_every_s is None:
        return None, f"mode {settings.mode} has none"
    try:
        return stack.enter_context(SmallDisk(path)), None
    except NoDisk as error:
        return None, str(error)


def drive(
    driver: Driver, roles: Roles, settings: Settings, names: list[str], *, disk: bool
) -> list[str]:
    """From the first process's start to the last one's end; why it ended too early, if it did."""
    plan = Plan(
        settings.seed,
        settings.seconds,
        settings.mode,
        names,
        gap_s=settings.kill_every,
        broker_restarts=settings.broker_restarts,
        disk=disk,
    )
    faults = make_schedule(plan)
    say(f"seed {settings.seed}, {len(faults)} faults in {settings.seconds} s")
    try:
        with closing(driver):
            driver.run(faults, seconds=settings.seconds, steps=settings.steps)
    except (NotDrained, RoleGaveUp, BrokerError) as error:
        return [str(error)]
    except (GroupstreamError, KafkaException) as error:
        return [f"the driver ended: {error}"]
    finally:
        roles.end()
    return []


def write_sums(found: dict[str, Any], roles: Roles) -> None:
    path = BUILD / "chaos.json"
    ends = {role: dict(counts) for role, counts in sorted(roles.exits.items())}
    figures = found | {"ended_by_themselves": ends}
    path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    for name, value in found.items():
        if name not in ("problems", "replay"):
            say(f"{name:>20}  {value}")
    for role, counts in ends.items():
        told = ", ".join(f"{how} ({count})" for how, count in counts.items())
        say(f"{role} ended by itself: {told}")
    say(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
