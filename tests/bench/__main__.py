"""python -m tests.bench [groups=3000] [tokens=2048] [rounds=3] [rate=20] [latency_groups=400]"""

import shutil
import sys
from pathlib import Path

from rich.console import Console

from infra.broker import start_broker
from tests.bench import assembly, latency
from tests.bench.load import own_directory
from tests.bench.results import write

DEFAULTS = {"groups": 3000, "tokens": 2048, "rounds": 3, "rate": 20, "latency_groups": 400}


def main(arguments: list[str]) -> None:
    settings = dict(DEFAULTS)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in settings or not value.isdecimal():
            sys.exit(f"{argument!r} is no setting; known: {', '.join(settings)}, each a number")
        settings[name] = int(value)
    console, directory = Console(), own_directory()

    def say(text: str) -> None:
        console.print(text, highlight=False)

    with start_broker(directory / "kafka", progress=say) as broker:
        results = latency.measure(
            broker.bootstrap_servers,
            directory,
            groups=settings["latency_groups"],
            rate=settings["rate"],
            say=say,
        )
        ratio = assembly.measure(
            broker.bootstrap_servers,
            directory,
            groups=settings["groups"],
            tokens=settings["tokens"],
            rounds=settings["rounds"],
            say=say,
        )
    write([ratio, *results], Path("build/bench.json"))
    shutil.rmtree(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
