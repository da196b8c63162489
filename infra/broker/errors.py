"""What can go wrong when a broker is started or stopped."""

from collections.abc import Sequence
from typing import NamedTuple


class BrokerError(Exception):
    """Base of the errors of this package."""


class WaitTimedOut(BrokerError):
    """Something did not happen before its deadline."""


class CommandFailed(BrokerError):
    """A program that we ran ended with another code than 0, or could not be run at all."""


class AttemptFailed(BrokerError):
    """One way to get a broker does not work here; `fix` is what the user can do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class NotOurBroker(BrokerError):
    """kill() or restart() of a broker that somebody else runs."""


class Failure(NamedTuple):
    """A way that was tried, why it failed, and what would make it work."""

    way: str
    reason: str
    fix: str


class BrokerUnavailable(BrokerError):
    """No way to get a broker works: `failures` in the order in which they were tried."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        tried = [f"  {n}. {one.way}: {one.reason}" for n, one in enumerate(failures, 1)]
        fixes = list(dict.fromkeys(one.fix for one in failures))
        super().__init__(
            "no Kafka broker could be reached or started. Tried, in this order:\n"
            + "\n".join(tried)
            + "\nAny one of these fixes it, the shortest first:\n"
            + "\n".join(f"  - {fix}" for fix in sorted(fixes, key=len))
        )
