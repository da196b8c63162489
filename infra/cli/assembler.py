"""`groupstream-assembler`: makes complete groups of rows."""

import threading
from typing import Annotated

import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from schemas.config import Config

app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: ConfigFile,
    instance: Annotated[
        str, typer.Option(help="A name of its own for each assembler, kept over restarts.")
    ] = "0",
    overrides: Overrides = None,
) -> None:
    """Run an assembler; several of them share the partitions."""

    def assemble(config: Config, stop: threading.Event) -> None:
        from consumers.worker import run  # noqa: PLC0415

        run(config, instance=instance, stop=stop)

    raise typer.Exit(run_role(f"assembler-{instance}", config, overrides, assemble))


if __name__ == "__main__":
    app()
