"""Ends the roles in order, each within its deadline."""

import time
from collections.abc import Callable, Sequence

from infra.up.child import Child

STOP_S = 15.0  # a role ends a transaction and its clients within seconds
TRAINER_STOP_S = 60.0  # a step and its checkpoint may be on their way
KILL_S = 10.0
POLL_S = 0.05


def stop_in_order(
    children: Sequence[Child],
    hurry: Callable[[], bool],
    tick: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """SIGTERM one after the other, SIGKILL after its deadline or as soon as hurry() is true.

    `tick` is called while it waits, `note` gets a line for each role that had to be killed.
    """
    for child in children:
        if child.has_ended():
            continue
        child.ask_to_stop()
        deadline_s = TRAINER_STOP_S if child.role.name == "trainer" else STOP_S
        if not _ended_within(child, deadline_s, hurry, tick):
            note(f"{child.role.name} did not stop within {deadline_s:.0f} s: killing it")
            kill(child, tick)


def kill(child: Child, tick: Callable[[], None]) -> None:
    """SIGKILL; only a process that hangs in the kernel outlives KILL_S."""
    child.kill()
    _ended_within(child, KILL_S, lambda: False, tick)


def _ended_within(
    child: Child, deadline_s: float, hurry: Callable[[], bool], tick: Callable[[], None]
) -> bool:
    deadline = time.monotonic() + deadline_s
    while not child.has_ended():
        if hurry() or time.monotonic() > deadline:
            return False
        tick()
        time.sleep(POLL_S)
    return True
