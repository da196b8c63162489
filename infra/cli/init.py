"""`groupstream-init`: creates the run's topics and its manifest."""

import threading

import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from schemas.config import Config

app = typer.Typer(add_completion=False)


@app.command()
def main(config: ConfigFile, overrides: Overrides = None) -> None:
    """Create the run: check the broker, make the topics, write the manifest. Again is harmless."""
    raise typer.Exit(run_role("init", config, overrides, _init))


def _init(config: Config, _: threading.Event) -> None:
    from infra.init import init_run  # noqa: PLC0415

    init_run(config)


if __name__ == "__main__":
    app()
