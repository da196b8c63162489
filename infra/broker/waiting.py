"""Waits that end: each has a deadline, and says what it waits for every two seconds."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tenacity

from infra.broker.errors import CommandFailed, WaitTimedOut

Progress = Callable[[str], None]
"""Takes one line of text for the user; called from the thread that waits."""

REPORT_EVERY_S = 2.0
POLL_S = 0.05


class _Reporter:
    """Tells `progress` every two seconds what is waited for and for how long."""

    def __init__(self, what: Callable[[], str], progress: Progress) -> None:
        self._what, self._progress = what, progress
        self._started_s = self._reported_s = time.monotonic()

    def __call__(self, _: object = None) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._progress(f"{self._what()} ({now_s - self._started_s:.0f} s)")


def wait_until(
    happened: Callable[[], bool], what: str, deadline_s: float, progress: Progress
) -> None:
    """Polls `happened`. Raises WaitTimedOut after `deadline_s`; whatever `happened` raises."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda answer: not answer),
        stop=tenacity.stop_after_delay(deadline_s),
        wait=tenacity.wait_fixed(POLL_S),
        before_sleep=_Reporter(lambda: what, progress),
    )
    try:
        retrying(happened)
    except tenacity.RetryError:
        raise WaitTimedOut(f"{what}: not within {deadline_s:g} s") from None


def run_command(
    arguments: Sequence[str | Path],
    what: str,
    deadline_s: float,
    progress: Progress,
    *,
    log: Path,
    detail: Callable[[], str] = lambda: "",
) -> None:
    """Runs a program to its end with its output in the file `log`, reporting meanwhile.

    `detail` is added to each report. Raises CommandFailed with the output's end when the program
    fails or is missing, WaitTimedOut (the program is killed) after `deadline_s`.
    """
    reporter = _Reporter(lambda: what + detail(), progress)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise CommandFailed(f"{arguments[0]} cannot be run: {error}") from error
        started_s = time.monotonic()
        try:
            while process.poll() is None:
                reporter()
                if time.monotonic() - started_s > deadline_s:
                    raise WaitTimedOut(f"{what}: not within {deadline_s:g} s; see {log}")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise CommandFailed(
            f"{what}: {arguments[0]} ended with code {process.returncode}: {last_lines(log)}"
        )


def last_lines(log: Path, count: int = 5) -> str:
    """The last lines of a log file that are not empty, or a word that there are none."""
    if not log.exists():
        return f"({log} does not exist)"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-count:]) or f"({log} is empty)"
