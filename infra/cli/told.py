"""Errors that a user can act on, as one message without a traceback."""

from collections.abc import Callable

from rich.console import Console

from infra.cli.exit_codes import exit_code_of
from schemas.errors import GroupstreamError

_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def told(command: Callable[[], int]) -> int:
    """The command's exit code, or the error's."""
    try:
        return command()
    except GroupstreamError as error:
        _errors.print("groupstream:", style="bold red", end=" ")
        _errors.print(str(error), markup=False)
        return exit_code_of(error)
