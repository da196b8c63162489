"""`groupstream`: everything together on one machine, and a close look at any run."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from infra.cli.dlq import app as dlq
from infra.cli.exit_codes import ExitCode
from infra.cli.groups import app as groups
from infra.cli.logs import log_to_file
from infra.cli.options import ConfigFile, Overrides
from infra.cli.rows import rows
from infra.cli.told import told
from schemas.config_file import load_config

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Stream reinforcement-learning rollouts through Kafka, from sharded gyms to a trainer."""


@app.command()
def up(
    config: ConfigFile,
    assemblers: Annotated[int, typer.Option(min=1, help="How many assembler processes.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Run everything: broker, init, and every role until the run has finished. Ctrl-C stops it."""

    def bring_up() -> int:
        from infra.up.run import Launch, up  # noqa: PLC0415
        from infra.up.summary import print_summary  # noqa: PLC0415

        loaded = load_config(config, overrides or [])
        log_to_file(loaded.log_directory, "up")
        stop, hurry = stop_and_hurry()
        console = Console()
        outcome = up(Launch(config, overrides or [], assemblers), console, stop=stop, hurry=hurry)
        print_summary(console, loaded, config, outcome)
        return ExitCode.REFUSED if outcome.problem else ExitCode.DONE

    raise typer.Exit(told(bring_up))


@app.command()
def resume(config: ConfigFile, overrides: Overrides = None) -> None:
    """Take back what stopped the run for good; `groupstream up` goes on from there."""

    def take_back() -> int:
        from infra.up.resume import resume  # noqa: PLC0415
        from infra.up.run import Launch, session  # noqa: PLC0415

        console = Console(highlight=False, soft_wrap=True)
        note: Callable[[str], None] = console.print
        with session(Launch(config, overrides or []), note) as running:
            fatal = resume(running, note)
        console.print(
            "nothing had stopped this run"
            if fatal is None
            else f"the run may go on: groupstream up --config {config}"
        )
        return ExitCode.DONE

    raise typer.Exit(told(take_back))


@app.command()
def demo(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="seed=7, steps=20, or any value of the configuration, as key=value."),
    ] = None,
    go_on: Annotated[
        bool | None,
        typer.Option("--continue/--new", help="What to do about a demo run that did not finish."),
    ] = None,
    build: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("build"),
) -> None:
    """Train a small model on sums and products, watch its reward climb, and audit the result."""

    def show() -> int:
        from infra.demo.demo import run_demo  # noqa: PLC0415

        stop, hurry = stop_and_hurry()
        return run_demo(settings or [], go_on, build, Console(), stop=stop, hurry=hurry)

    raise typer.Exit(told(show))


def stop_and_hurry() -> tuple[threading.Event, threading.Event]:
    """The first SIGINT, SIGTERM or SIGHUP sets the first event, the second one both."""
    stop, hurry = threading.Event(), threading.Event()

    def ask(_: int, __: FrameType | None) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ask)
    return stop, hurry


app.command()(rows)
app.add_typer(dlq, name="dlq")
app.add_typer(groups, name="groups")

if __name__ == "__main__":
    app()
