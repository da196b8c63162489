"""What a role's exit code says to its supervisor, and to people's scripts."""

from enum import IntEnum

from schemas.errors import DeadlineExceeded, Fenced, GroupstreamError


class ExitCode(IntEnum):
    DONE = 0  # the run finished, or we were asked to stop
    REFUSED = 1  # a person must act: configuration, dataset, manifest, a fatal run
    USAGE = 2  # click's own
    FENCED = 3  # a newer process with the same role took over
    FAILED = 70  # a bug, or something that nobody expected: there is a traceback in the log
    TRY_AGAIN = 75  # a wait ended without its event: the next start may succeed


def exit_code_of(error: BaseException) -> ExitCode:
    match error:
        case Fenced():
            return ExitCode.FENCED
        case DeadlineExceeded():
            return ExitCode.TRY_AGAIN
        case GroupstreamError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED
