"""python -m tests.hostile [seed=7] [rows=1000000]

Exit code 0: the assembler lived, its memory was flat, and each record is in `dlq` with its reason
or was rightly used. build/hostile.json has the figures.
"""

import shutil
import sys
from pathlib import Path

import orjson
from rich.console import Console

from infra.broker import start_broker, stop_leftover
from schemas.limits import MIB
from tests.hostile.attack import Died, run_attack
from tests.rows import make_manifest
from tests.run import create_run, make_config, manifest_fields

BUILD = Path("build")
KNOWN = {"seed": 7, "rows": 1_000_000}

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text, markup=False)


def main(arguments: list[str]) -> int:
    settings = dict(KNOWN)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in KNOWN or not value.isdecimal():
            sys.exit(f"{argument!r} is no setting; known are {', '.join(KNOWN)}, each a number")
        settings[name] = int(value)
    directory = BUILD / "hostile"
    stop_leftover(directory / "broker", say)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with start_broker(directory / "broker", record_bytes=MIB, progress=say) as broker:
        limits = {"max_row_bytes": MIB // 2, "max_group_bytes": MIB // 2}
        config = make_config(broker.bootstrap_servers, "hostile", directory, **limits)
        manifest = make_manifest(**manifest_fields(config))
        create_run(config, manifest)
        try:
            outcome = run_attack(
                config,
                manifest,
                directory,
                seed=settings["seed"],
                records=settings["rows"],
                say=say,
            )
        except Died as error:
            say(f"FAILED: {error}\nseed {settings['seed']}; logs: {directory}")
            return 1
    found = settings | outcome.as_json()
    (BUILD / "hostile.json").write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    say(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
