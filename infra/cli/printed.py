"""What a command prints for programs: one JSON object a line."""

from typing import Annotated, Any

import orjson
import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, or one a line.")]


def print_json(view: dict[str, Any]) -> None:
    typer.echo(orjson.dumps(view).decode())
