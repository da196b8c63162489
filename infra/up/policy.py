"""What a supervisor does about a role that ended. Pure: exit status and times in, a verdict out.

exit 0, run finished ─▶ Done             killed, or an unexpected error ─▶ Restart, later each time
exit 0, run goes on  ─▶ Restart          a person must act, or too many in a row ─▶ Stop
"""

import signal
from dataclasses import dataclass

from infra.cli.exit_codes import ExitCode

SETTLED_S = 60.0  # a role that lived so long had started well: its failures begin anew
ERRORS_IN_A_ROW = 5
KILLS_IN_A_ROW = 20  # who kills a role so often does it on purpose, or the memory is too small
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0


@dataclass(frozen=True)
class Done:
    """The role has nothing left to do."""


@dataclass(frozen=True)
class Restart:
    delay_s: float
    why: str


@dataclass(frozen=True)
class Stop:
    """The run cannot go on by itself."""

    why: str


Verdict = Done | Restart | Stop


class Supervision:
    """Counts each role's failures in a row."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def judge(self, role: str, returncode: int, lived_s: float, *, finished: bool) -> Verdict:
        """`returncode` as subprocess gives it: -N for signal N. `finished`: `control` says so."""
        why = said(returncode)
        if returncode == ExitCode.DONE:
            return Done() if finished else Restart(FIRST_DELAY_S, "ended before the run finished")
        if returncode in (ExitCode.REFUSED, ExitCode.USAGE):
            return Stop(f"{role} {why}")
        in_a_row = 1 if lived_s >= SETTLED_S else self._in_a_row.get(role, 0) + 1
        self._in_a_row[role] = in_a_row
        limit = KILLS_IN_A_ROW if returncode < 0 else ERRORS_IN_A_ROW
        if in_a_row >= limit:
            return Stop(f"{role} {why}, {in_a_row} times in a row within {SETTLED_S:.0f} s each")
        return Restart(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (in_a_row - 1)), why)


def said(returncode: int) -> str:
    """An exit status in words."""
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    words = {
        ExitCode.DONE: "ended",
        ExitCode.REFUSED: "cannot go on",
        ExitCode.USAGE: "does not understand its command line",
        ExitCode.FENCED: "was replaced by a newer process",
        ExitCode.TRY_AGAIN: "waited in vain",
    }
    word = words.get(ExitCode(returncode)) if returncode in set(ExitCode) else None
    return word or f"failed with exit code {returncode}"
