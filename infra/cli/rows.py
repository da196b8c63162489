"""`groupstream rows`: everything that arrived for one task, and what was done with it."""

from typing import Annotated

import typer

from infra.cli.exit_codes import ExitCode
from infra.cli.options import ConfigFile, Overrides
from infra.cli.printed import AsJson, print_json
from infra.cli.told import told
from schemas.config_file import load_config


def rows(
    *,
    config: ConfigFile,
    task: Annotated[int, typer.Argument(min=0, help="The task_index.")],
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Every attempt of a task: what arrived when, what was done with it, and why."""

    def show() -> int:
        from infra.inspection.pictures import history_in  # noqa: PLC0415
        from infra.inspection.reading import RunReader  # noqa: PLC0415
        from infra.inspection.tables import console, show_history  # noqa: PLC0415
        from infra.inspection.views import history_view  # noqa: PLC0415

        with RunReader(load_config(config, overrides or [])) as reader:
            history = history_in(reader, task)
        if as_json:
            print_json(history_view(history))
        else:
            show_history(console(), history)
        return ExitCode.DONE

    raise typer.Exit(told(show))
