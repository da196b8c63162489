"""`groupstream-dispatcher`: hands out the prompts of the dataset and keeps the ledger."""

import threading

import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from schemas.config import Config

app = typer.Typer(add_completion=False)


@app.command()
def main(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run the dispatcher of a run. A second one takes over from the first."""
    raise typer.Exit(run_role("dispatcher", config, overrides, _dispatch))


def _dispatch(config: Config, stop: threading.Event) -> None:
    from producers.dispatcher import run  # noqa: PLC0415

    run(config, stop=stop)


if __name__ == "__main__":
    app()
