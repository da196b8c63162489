"""Whose payload leaves the memory when the buffered rows are over their budget.

Pure. The cohort that is needed first always keeps its payload, so the run always moves: when it
settles, the next one is the first.
"""

from collections.abc import Iterable

from consumers.cohort import Cohort

LOW_SHARE = 7 / 8  # let go down to this, so that not every further row sorts the cohorts again


def needed_first(cohorts: Iterable[Cohort]) -> Cohort | None:
    return min((c for c in cohorts if c.rows), key=_rank, default=None)


def to_let_go(cohorts: Iterable[Cohort], used_bytes: int, budget_bytes: int) -> list[Cohort]:
    """The last needed ones, until the rest fits; never the first needed one."""
    if used_bytes <= budget_bytes:
        return []
    ranked = sorted((c for c in cohorts if c.rows), key=_rank)
    return _from_the_end(ranked[1:], used_bytes - int(budget_bytes * LOW_SHARE))


def room_for(
    wanted: Cohort, cohorts: Iterable[Cohort], used_bytes: int, budget_bytes: int
) -> list[Cohort] | None:
    """Who must go so that `wanted` can be read again; None where it has to wait.

    Only cohorts that are needed later than it give way. The first needed one never waits.
    """
    missing_bytes = wanted.rows_bytes - wanted.resident_bytes
    ranked = sorted((c for c in cohorts if c.rows), key=_rank)
    excess_bytes = used_bytes + missing_bytes - budget_bytes
    later = _from_the_end([c for c in ranked if c.rank > wanted.rank], excess_bytes)
    freed_bytes = sum(cohort.resident_bytes for cohort in later)
    if freed_bytes >= excess_bytes or ranked[0] is wanted:
        return later
    return None


def _from_the_end(ranked: list[Cohort], excess_bytes: int) -> list[Cohort]:
    chosen = []
    for cohort in reversed(ranked):
        if excess_bytes <= 0:
            break
        if cohort.resident_bytes:
            chosen.append(cohort)
            excess_bytes -= cohort.resident_bytes
    return chosen


def _rank(cohort: Cohort) -> tuple[int, int, int]:
    return cohort.rank
