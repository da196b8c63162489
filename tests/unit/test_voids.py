"""When transactions that come to nothing, one after the other, are no chance any more."""

import pytest

from consumers.voids import FOR_S, LONGEST_REST_S, MANY, Voids
from schemas.errors import TransactionsFail


def test_many_in_a_row_over_a_while_end_the_process_with_both_reasons() -> None:
    voids = Voids("r.groups")
    for number in range(MANY):
        voids.count(f"reason {number}", now_s=float(number))
    voids.count("later", now_s=FOR_S - 0.1)
    with pytest.raises(TransactionsFail, match=r"12 transactions.*reason 0;.*newest;.*r\.groups"):
        voids.count("newest", now_s=FOR_S)


def test_few_or_quick_ones_do_not() -> None:
    voids = Voids("r.groups")
    for number in range(MANY - 1):
        voids.count("slow", now_s=number * FOR_S)
    voids.end()
    for _ in range(5 * MANY):
        voids.count("quick", now_s=1.0)


def test_each_rests_longer_than_the_one_before() -> None:
    voids = Voids("r.groups")
    rests = [voids.count("r", now_s=0.0) for _ in range(20)]
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S
    voids.end()
    assert voids.count("r", now_s=0.0) == rests[0]
