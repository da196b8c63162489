"""`groupstream-monitor`: what a run does now."""

from typing import Annotated

import typer

from infra.cli.exit_codes import ExitCode
from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import stop_on_signals
from infra.cli.told import told
from schemas.config_file import load_config

app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: ConfigFile,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a snapshot.")] = False,
    once: Annotated[bool, typer.Option(help="One snapshot, then end.")] = False,
    overrides: Overrides = None,
) -> None:
    """Show the partitions, the groups and the processes of a run, live. Reads only."""

    def watch() -> int:
        from infra.monitor.run import run  # noqa: PLC0415

        loaded = load_config(config, overrides or [])
        run(loaded, as_json=as_json, once=once, stop=stop_on_signals())
        return ExitCode.DONE

    raise typer.Exit(told(watch))


if __name__ == "__main__":
    app()
