"""Runs one role in this process: configuration, log, signals, and an exit code that says why."""

import faulthandler
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from infra.cli.exit_codes import ExitCode, exit_code_of
from infra.cli.logs import log_to, log_to_terminal
from infra.up.parent import die_with_supervisor
from schemas.config import Config
from schemas.config_file import load_config
from schemas.errors import GroupstreamError

Role = Callable[[Config, threading.Event], None]

log = logging.getLogger(__name__)


def run_role(
    name: str,
    config_file: Path,
    overrides: list[str] | None,
    role: Role,
    *,
    log_name: str | None = None,
) -> int:
    """Blocks until the role ends; its exit code. Must be called from the main thread.

    SIGINT and SIGTERM ask it to stop; a second one ends the process at once.
    """
    log_to_terminal()
    die_with_supervisor()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # says where every thread stands, and goes on
    stop = stop_on_signals()
    try:
        config = load_config(config_file, overrides or [])
        log_to(config.log_directory, log_name or name)
        role(config, stop)
    except GroupstreamError as error:
        log.error("%s ended: %s", name, error)  # for people: the sentence, no traceback
        return exit_code_of(error)
    except Exception:
        log.exception("%s ended by an error that nobody expected", name)
        return ExitCode.FAILED
    return ExitCode.DONE


def stop_on_signals() -> threading.Event:
    """The event that the first SIGINT or SIGTERM sets; the second has its default effect."""
    stop = threading.Event()

    def ask(number: int, _: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop
