"""python -m tests.chaos [seed=7] [seconds=60] [mode=mixed|kill|stop|broker|quiet] [steps=0]

Exit code 0: everything that was dispatched is accounted for exactly once. 1: it is not, and the
run's directory, build/chaos/<seed>, has the logs.
"""

import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from infra.broker import start_broker, stop_leftover
from infra.init import init_run
from infra.up.quiet import stderr_to
from schemas.errors import GroupstreamError
from tests.chaos.auditor import Findings, examine
from tests.chaos.driver import Deeds, Driver, NotDrained
from tests.chaos.processes import RoleGaveUp, Roles
from tests.chaos.schedule import make_schedule
from tests.chaos.settings import GROUP_BYTES, BadSetting, Settings, write_run

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
    with start_broker(
        directory / "broker", record_bytes=GROUP_BYTES, heap=HEAP, progress=say
    ) as broker:
        config, file = write_run(settings, broker.bootstrap_servers, directory)
        init_run(config)
        roles, deeds = Roles(config, file), Deeds()
        driver = Driver(config, roles, broker, deeds=deeds, say=say)
        problems = drive(driver, roles, settings)
        try:
            findings = examine(config, deeds.kills_ms)
        except GroupstreamError as error:
            return [*problems, f"the audit ended: {error}"]
    problems += findings.problems
    write_sums(sums(settings, deeds, findings) | {"problems": problems}, roles)
    return problems


def drive(driver: Driver, roles: Roles, settings: Settings) -> list[str]:
    """From the first process's start to the last one's end; why it ended too early, if it did."""
    faults = make_schedule(settings.seed, settings.seconds, roles.names, settings.mode)
    say(f"seed {settings.seed}, {len(faults)} faults in {settings.seconds} s")
    try:
        with closing(driver):
            driver.run(faults, seconds=settings.seconds, steps=settings.steps)
    except (NotDrained, RoleGaveUp) as error:
        return [str(error)]
    finally:
        roles.end()
    return []


def sums(settings: Settings, deeds: Deeds, findings: Findings) -> dict[str, Any]:
    audit = findings.audit
    return {
        "seed": settings.seed,
        "seconds": settings.seconds,
        "mode": settings.mode,
        "kills": deeds.kills,
        "stops": deeds.stops,
        "broker_restarts": deeds.broker_restarts,
        "dispatched": audit.dispatched,
        "accepted": audit.accepted,
        "abandoned": audit.abandoned,
        "outstanding": audit.outstanding,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "out_of_order": audit.out_of_order,
        "longest_recovery_s": findings.longest_recovery_s,
        "trained_steps": audit.trained_steps,
        "rows": audit.rows,
        "events": findings.events,
        "dead_letters": findings.dead_letters,
    }


def write_sums(found: dict[str, Any], roles: Roles) -> None:
    path = BUILD / "chaos.json"
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    for name, value in found.items():
        if name != "problems":
            say(f"{name:>20}  {value}")
    for role, ends in sorted(roles.exits.items()):
        told = ", ".join(f"{how} ({count})" for how, count in ends.items())
        say(f"{role} ended by itself: {told}")
    for words in roles.last_words:
        say(words)
    say(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
