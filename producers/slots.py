"""Which slots of the window of targets have no task. Pure.

At policy version v the window is the targets v..v+lead, with N slots each. A slot is covered by
its live task, or for good by an accepted one; an abandoned task leaves it uncovered again.
"""

from collections.abc import Iterator, Mapping


def window(version: int, lead: int, last_target: int | None) -> range:
    """The targets that may have tasks at policy version `version`."""
    end = version + lead
    return range(version, (end if last_target is None else min(end, last_target)) + 1)


def uncovered(targets: range, slots: int, covered: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """(target, slot) without a task, lowest first. `covered`: bitmap of slots by target."""
    for target in targets:
        taken = covered.get(target, 0)
        for slot in range(slots):
            if not taken >> slot & 1:
                yield target, slot
