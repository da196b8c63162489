"""`groupstream dlq`: what was turned away, why, and what was done about it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.exit_codes import ExitCode
from infra.cli.options import ConfigFile, Overrides
from infra.cli.printed import AsJson, print_json
from infra.cli.told import told
from schemas.config_file import load_config
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.inspection.letters import Letter, Resolution, Selection

app = typer.Typer(no_args_is_help=True)

Reason = Annotated[str | None, typer.Option(help="Only the letters with this reason.")]
Everything = Annotated[bool, typer.Option("--all", help="Every letter that is still open.")]
Again = Annotated[bool, typer.Option(help="Also what was resolved before.")]
Where = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PARTITION OFFSET] [KEY=VALUE]...",
        help="One letter, as `dlq list` names it; and values over the file's.",
        show_default=False,
    ),
]


@app.callback()
def main() -> None:
    """Dead letters: records of `rows` that must not be trained, kept as they came."""


@app.command("list")
def list_letters(
    *,
    config: ConfigFile,
    reason: Reason = None,
    task: Annotated[int | None, typer.Option(help="Only the letters of this task.")] = None,
    resolved_too: Annotated[
        bool, typer.Option("--all", help="Also those that were replayed or dropped.")
    ] = False,
    summary: Annotated[bool, typer.Option(help="Only how many there are by reason.")] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """One line a letter, and how many there are by reason."""

    def show() -> int:
        from infra.inspection.letters import Selection  # noqa: PLC0415
        from infra.inspection.pictures import letters_of  # noqa: PLC0415
        from infra.inspection.reading import RunReader  # noqa: PLC0415
        from infra.inspection.tables import console, letters_table, reasons_line  # noqa: PLC0415
        from infra.inspection.views import letter_view, reasons_view  # noqa: PLC0415

        wanted = Selection(reason=reason, task=task, resolved_too=resolved_too)
        with RunReader(load_config(config, overrides or [])) as reader:
            letters = [
                letter
                for partition in reader.partitions
                for letter in letters_of(reader, partition)
                if wanted.takes(letter)
            ]
        if as_json:
            for view in [reasons_view(letters)] if summary else map(letter_view, letters):
                print_json(view)
            return ExitCode.DONE
        out = console()
        if letters and not summary:
            out.print(letters_table(letters))
        out.print(reasons_line(letters), markup=False, soft_wrap=True)
        return ExitCode.DONE

    raise typer.Exit(told(show))


@app.command()
def show(
    *,
    config: ConfigFile,
    partition: Annotated[int, typer.Argument(min=0, help="Of `dlq`.")],
    offset: Annotated[int, typer.Argument(min=0, help="Of `dlq`.")],
    value_to: Annotated[
        Path | None, typer.Option(help="Write the record's bytes to this file, verbatim.")
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """One letter: headers, message, and the record, or its first bytes where it does not decode."""

    def open_letter() -> int:
        from infra.inspection.letters import letter_of  # noqa: PLC0415
        from infra.inspection.pictures import letter_at, letters_of  # noqa: PLC0415
        from infra.inspection.reading import RunReader  # noqa: PLC0415
        from infra.inspection.stored import Place  # noqa: PLC0415
        from infra.inspection.tables import console, show_letter  # noqa: PLC0415
        from infra.inspection.views import opened_letter_view  # noqa: PLC0415

        place = Place(partition, offset)
        with RunReader(load_config(config, overrides or [])) as reader:
            stored = letter_at(reader, place)
            letters = {letter.place: letter for letter in letters_of(reader, partition)}
        letter = letters.get(place) or letter_of(stored)  # it may be deleted between the two reads
        if value_to is not None:
            _write(value_to, stored.value or b"")
        if as_json:
            print_json(opened_letter_view(letter, stored))
        else:
            show_letter(console(), letter, stored)
        return ExitCode.DONE

    raise typer.Exit(told(open_letter))


@app.command()
def replay(
    *,
    config: ConfigFile,
    where: Where = None,
    reason: Reason = None,
    everything: Everything = False,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Send letters to `rows` again, as they came, on the partition of their task."""
    from infra.inspection.letters import Resolution  # noqa: PLC0415

    selection, overrides = selected(where or [], reason, everything, again)
    raise typer.Exit(
        told(lambda: _resolve(config, overrides, selection, Resolution.REPLAYED, as_json=as_json))
    )


@app.command()
def drop(
    *,
    config: ConfigFile,
    where: Where = None,
    reason: Reason = None,
    everything: Everything = False,
    again: Again = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Mark letters as dealt with. Nothing is deleted."""
    from infra.inspection.letters import Resolution  # noqa: PLC0415

    selection, overrides = selected(where or [], reason, everything, again)
    asks = sys.stdin.isatty() and not yes
    raise typer.Exit(
        told(
            lambda: _resolve(
                config, overrides, selection, Resolution.DROPPED, as_json=as_json, asks=asks
            )
        )
    )


def _write(path: Path, value: bytes) -> None:
    try:
        path.write_bytes(value)
    except OSError as error:
        raise ConfigError(f"--value-to {path}: {error.strerror}") from error


def selected(
    where: list[str], reason: str | None, everything: bool, again: bool
) -> tuple["Selection", list[str]]:
    """The selection, and the values over the file's. Raises typer.BadParameter."""
    from infra.inspection.letters import Selection  # noqa: PLC0415
    from infra.inspection.stored import Place  # noqa: PLC0415

    overrides = [word for word in where if "=" in word]
    numbers = [word for word in where if "=" not in word]
    ways = [bool(numbers), reason is not None, everything]
    if sum(ways) != 1:
        raise typer.BadParameter("give one of PARTITION OFFSET, --reason or --all")
    place = None
    if numbers:
        if len(numbers) != 2 or not all(word.isdecimal() for word in numbers):
            raise typer.BadParameter(f"{' '.join(numbers)}: not PARTITION OFFSET, two numbers")
        place = Place(int(numbers[0]), int(numbers[1]))
    return Selection(place=place, reason=reason, resolved_too=again), overrides


def _resolve(
    config: Path,
    overrides: list[str],
    selection: "Selection",
    resolution: "Resolution",
    *,
    as_json: bool,
    asks: bool = False,
) -> int:
    from infra.inspection.reading import RunReader  # noqa: PLC0415
    from infra.inspection.resolving import resolve  # noqa: PLC0415
    from infra.inspection.tables import console, letters_table, reasons_line  # noqa: PLC0415
    from infra.inspection.views import letter_view  # noqa: PLC0415

    def agreed(letters: list["Letter"]) -> bool:
        return not asks or typer.confirm(f"Mark as dropped: {reasons_line(letters)}?", err=True)

    resolved: list[Letter] = []
    with RunReader(load_config(config, overrides)) as reader:
        for letter in resolve(reader, selection, resolution, agreed):
            resolved.append(letter)
            if as_json:
                print_json(letter_view(letter))
    if not as_json:
        out = console()
        if resolved:
            out.print(letters_table(resolved))
        out.print(f"{resolution}: {reasons_line(resolved)}", markup=False, soft_wrap=True)
    return ExitCode.DONE
