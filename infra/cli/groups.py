"""`groupstream groups`: where the tasks of a run stand, and what is in a group."""

from typing import Annotated

import typer

from infra.cli.exit_codes import ExitCode
from infra.cli.options import ConfigFile, Overrides
from infra.cli.printed import AsJson, print_json
from infra.cli.told import told
from infra.inspection.tasks import Standing
from schemas.config_file import load_config

app = typer.Typer(no_args_is_help=True)


@app.callback()
def main() -> None:
    """Prompt groups: one task each, from its dispatch to its training."""


@app.command()
def ls(
    *,
    config: ConfigFile,
    state: Annotated[
        Standing | None, typer.Option(help="Only these; accepted includes trained.")
    ] = None,
    target: Annotated[int | None, typer.Option(help="Only the groups of this step.")] = None,
    summary: Annotated[bool, typer.Option(help="Only the sums.")] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """One line a task, and the sums: dispatched = accepted + abandoned + outstanding."""

    def show_all() -> int:
        from infra.inspection.pictures import tasks_of  # noqa: PLC0415
        from infra.inspection.reading import RunReader  # noqa: PLC0415
        from infra.inspection.tables import console, sums_line, tasks_table  # noqa: PLC0415
        from infra.inspection.tasks import selected, sums_of  # noqa: PLC0415
        from infra.inspection.views import line_view, sums_view  # noqa: PLC0415

        with RunReader(load_config(config, overrides or [])) as reader:
            of_target = selected(tasks_of(reader, reader.partitions).lines(), None, target)
        lines, sums = selected(of_target, state, None), sums_of(of_target)
        if as_json:
            for view in [sums_view(sums)] if summary else map(line_view, lines):
                print_json(view)
            return ExitCode.DONE
        out = console()
        if lines and not summary:
            out.print(tasks_table(lines))
        out.print(sums_line(sums), markup=False, soft_wrap=True)
        return ExitCode.DONE

    raise typer.Exit(told(show_all))


@app.command()
def show(
    *,
    config: ConfigFile,
    task: Annotated[int, typer.Argument(min=0, help="The task_index.")],
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """The accepted group of a task, row by row; or what became of the task instead."""

    def show_one() -> int:
        from infra.inspection.pictures import group_of  # noqa: PLC0415
        from infra.inspection.reading import RunReader  # noqa: PLC0415
        from infra.inspection.tables import console, show_group  # noqa: PLC0415
        from infra.inspection.views import task_group_view  # noqa: PLC0415

        with RunReader(load_config(config, overrides or [])) as reader:
            line, found = group_of(reader, task)
        place, size_bytes, group = found or (None, 0, None)
        if as_json:
            print_json(task_group_view(line, place, size_bytes, group))
        else:
            show_group(console(), line, group)
        return ExitCode.DONE

    raise typer.Exit(told(show_one))
