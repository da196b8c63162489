"""What one partition of `rows` is known to hold, rebuilt from Kafka alone after any crash.

Pure. Its commit point keeps two promises: no offset is committed above a row of an unsettled
task, and what is settled above that offset is known from the same commit.
"""

from collections.abc import Iterator

from consumers.cohort import Cohort
from consumers.decisions import CommitPoint
from consumers.settlement import SettledSet
from schemas.identity import ordinal_of
from schemas.records import OfAttempt


class Partition:
    """`position`: the next offset to read. Below `seen` everything was read and committed once."""

    def __init__(
        self, number: int, num_partitions: int, settled: SettledSet, position: int, seen: int
    ) -> None:
        self.number = number
        self.settled = settled
        self.position = position
        self.seen = seen
        self.has_changed = False
        self._num_partitions = num_partitions
        self._tasks: dict[int, dict[int, Cohort]] = {}
        # Cohorts open in offset order and dicts keep it: the first one has the lowest offset.
        self._in_offset_order: dict[tuple[int, int], Cohort] = {}

    def is_settled(self, task_index: int) -> bool:
        return ordinal_of(task_index, self._num_partitions) in self.settled

    def cohort_of(self, record: OfAttempt, offset: int) -> Cohort:
        """The record's cohort; a new one holds the commit at `offset`."""
        attempts = self._tasks.setdefault(record.task_index, {})
        cohort = attempts.get(record.attempt)
        if cohort is None:
            cohort = Cohort(self.number, offset, record)
            attempts[record.attempt] = cohort
            self._in_offset_order[cohort.key] = cohort
        return cohort

    def settle(self, task_index: int) -> list[Cohort]:
        """The task is done, whatever its attempts; returns its cohorts, which are forgotten."""
        self.settled.add(ordinal_of(task_index, self._num_partitions))
        cohorts = list(self._tasks.pop(task_index, {}).values())
        for cohort in cohorts:
            del self._in_offset_order[cohort.key]
        return cohorts

    def cohorts(self) -> Iterator[Cohort]:
        """Every cohort of an unsettled task, failed ones too."""
        return iter(self._in_offset_order.values())

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def commit_point(self) -> CommitPoint:
        lowest = next(self.cohorts(), None)
        offset = self.position if lowest is None else lowest.first_offset
        return CommitPoint(self.number, offset, self.settled.encode(max(self.seen, self.position)))
