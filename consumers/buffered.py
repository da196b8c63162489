"""The cohorts of one assembler beyond their partitions: what they hold in memory, who waits.

Pure. `used_bytes` is exact: every payload enters by keep() or restore() and leaves by forget()
or because the budget lets it go.
"""

from collections.abc import Iterable

from consumers.admission import Incoming
from consumers.cohort import Cohort
from consumers.memory import room_for, to_let_go
from schemas.errors import OffsetsLost


class Buffered:
    def __init__(self, budget_bytes: int) -> None:
        self.used_bytes = 0
        self.let_go_count = 0
        self.held: dict[tuple[int, int], Cohort] = {}  # the replay buffer answered FULL
        self.unread: dict[tuple[int, int], Cohort] = {}  # it would accept, payload is let go
        self._budget_bytes = budget_bytes

    def waiting(self) -> list[Cohort]:
        """Complete groups that are not accepted yet."""
        return [*self.held.values(), *self.unread.values()]

    def forget(self, cohort: Cohort) -> None:
        """It settled, failed or moved to another assembler."""
        self.used_bytes -= cohort.resident_bytes
        self.stop_waiting(cohort)
        cohort.clear()

    def stop_waiting(self, cohort: Cohort) -> None:
        self.held.pop(cohort.key, None)
        self.unread.pop(cohort.key, None)

    def keep(self, payload_bytes: int) -> None:
        self.used_bytes += payload_bytes

    def keep_to_budget(self, live: Iterable[Cohort]) -> None:
        """`live`: every cohort that has not failed."""
        if self.used_bytes > self._budget_bytes:
            self._let_go(to_let_go(live, self.used_bytes, self._budget_bytes))

    def wanted(self, live: Iterable[Cohort]) -> list[tuple[int, int]]:
        """(partition, offset) of the rows of one group to read again, in ascending order.

        Makes room for them first; empty where nothing is missing, or room has to be waited for.
        """
        if not self.unread:
            return []
        cohort = min(self.unread.values(), key=lambda c: c.rank)
        giving_way = room_for(cohort, live, self.used_bytes, self._budget_bytes)
        if giving_way is None:
            return []
        self._let_go(giving_way)
        missing = [row.offset for row in cohort.rows.values() if row.payload is None]
        return [(cohort.partition, offset) for offset in sorted(missing)]

    def restore(self, incoming: Incoming) -> Cohort | None:
        """Puts a payload back; returns its cohort. Raises OffsetsLost where it is another."""
        for cohort in self.unread.values():
            row = cohort.missing_at(incoming.partition, incoming.offset)
            if row is None:
                continue
            if incoming.value is None or not row.equals(incoming.value):
                raise OffsetsLost(
                    f"offset {incoming.offset} of partition {incoming.partition} of `rows` holds "
                    "another record than before: was the topic deleted and created again?"
                )
            row.payload = incoming.value
            cohort.resident_bytes += row.size
            self.used_bytes += row.size
            return cohort
        return None

    def _let_go(self, cohorts: Iterable[Cohort]) -> None:
        for cohort in cohorts:
            self.used_bytes -= cohort.resident_bytes
            self.let_go_count += 1
            cohort.let_go()
