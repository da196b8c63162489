"""What the dispatcher may decide: a closed list, carried out by `producers/dispatcher.py`.

Prompts and declarations are written in the ledger's transaction, requests after its commit.
"""

from dataclasses import dataclass

from schemas.records import LedgerTask


@dataclass(frozen=True)
class SendPrompt:
    """The attempt `task.attempt` goes to its partition of `prompts.<shard>`."""

    task: LedgerTask


@dataclass(frozen=True)
class DeclareLastTarget:
    """No slot exists beyond `target`."""

    target: int


@dataclass(frozen=True)
class DeclareTargetSize:
    """`target` will have only `groups` groups."""

    target: int
    groups: int


@dataclass(frozen=True)
class DeclareFatal:
    """The run must stop, for `message`."""

    message: str


@dataclass(frozen=True)
class RequestCancel:
    """The task is given up; the assembler answers abandoned, or had accepted it."""

    task: LedgerTask


@dataclass(frozen=True)
class RequestFailure:
    """The current attempt of `task` is believed lost, for `reason`."""

    task: LedgerTask
    reason: str
    message: str


Written = SendPrompt | DeclareLastTarget | DeclareTargetSize | DeclareFatal
Request = RequestCancel | RequestFailure
