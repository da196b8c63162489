"""Which groups a step takes, and where a restart must read again.

Pure: no Kafka, no clock. A step's batch is every group of its target, by `task_index`, whatever
the order in which they arrived; groups of later targets wait for their step.

    add(read)       as `groups` delivers it: in order inside a partition, in any order over them
    take(size)      the groups of the next step, None while some are missing
    trained()       the next step is done: its groups may be forgotten
    offsets()       per partition the lowest offset of a group that is not yet trained
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import GroupsContradict
from schemas.records import AssembledGroup, Purpose


@dataclass(frozen=True)
class GroupRead:
    """A group and the place in `groups` where it stands."""

    partition: int
    offset: int
    group: AssembledGroup


class WaitingGroups:
    """The groups that were read and not yet trained.

    `next_step` is the step that is trained next; `positions` has, for each partition, the offset
    that is read next. `passed` counts groups that no step will take, by why.
    """

    def __init__(self, next_step: int, positions: Mapping[int, int]) -> None:
        self.next_step = next_step
        self.passed: Counter[str] = Counter()
        self._positions = dict(positions)
        self._by_step: dict[int, dict[int, GroupRead]] = {}

    def __len__(self) -> int:
        return sum(len(reads) for reads in self._by_step.values())

    def add(self, read: GroupRead) -> None:
        """Raises GroupsContradict where the task is already there."""
        group = read.group
        self._positions[read.partition] = read.offset + 1
        if group.purpose is Purpose.VALIDATION:
            self.passed["validation"] += 1
        elif group.target_step < self.next_step:  # a restart reads from the lowest that it needs
            self.passed["trained"] += 1
        else:
            waiting = self._by_step.setdefault(group.target_step, {})
            twin = waiting.setdefault(group.task_index, read)
            if twin is not read:
                raise GroupsContradict(
                    f"task {group.task_index} of step {group.target_step} stands twice in groups: "
                    f"{_place(twin)} and {_place(read)}; a task enters it once"
                )

    def arrived(self) -> list[int]:
        """The tasks of the next step that are here, ascending."""
        return sorted(self._by_step.get(self.next_step, {}))

    def take(self, size: int) -> list[AssembledGroup] | None:
        """The `size` groups of the next step by task_index, or None while some are missing.

        Raises GroupsContradict where there are more.
        """
        here = self._by_step.get(self.next_step, {})
        if len(here) > size:
            raise GroupsContradict(
                f"step {self.next_step} takes {size} groups, and groups has {len(here)} for it: "
                f"tasks {sorted(here)}"
            )
        return [here[task].group for task in sorted(here)] if len(here) == size else None

    def trained(self) -> None:
        """The groups of the next step are in the weights; the step after it is the next."""
        self._by_step.pop(self.next_step, None)
        self.next_step += 1

    def offsets(self) -> dict[int, int]:
        """Per partition the lowest offset of a group that is not yet trained, else the position."""
        lowest = dict(self._positions)
        for reads in self._by_step.values():
            for read in reads.values():
                lowest[read.partition] = min(lowest[read.partition], read.offset)
        return lowest


def _place(read: GroupRead) -> str:
    return f"partition {read.partition} offset {read.offset} (attempt {read.group.attempt})"
