"""What every command line takes."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The run's YAML file, the same for every role.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values over the file's, as grpo.max_num_steps=20.", show_default=False),
]
