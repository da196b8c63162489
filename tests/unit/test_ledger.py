"""The ledger is its records: folding them gives it back, and its sums always close."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.ledger import TOTALS_KEY, Ledger, LedgerBroken
from schemas.codec import decode, encode
from schemas.records import LedgerTask, LedgerTotals

G = 4


def task_of(task_index: int, target: int = 0, slot: int = 0, **changes: Any) -> LedgerTask:
    fields: dict[str, Any] = {
        "task_index": task_index,
        "attempt": 0,
        "target_step": target,
        "epoch": 0,
        "position": task_index,
        "agent": "sums",
        "shard": "gym",
        "replica": 0,
        "partition": 0,
        "seq": task_index,
        "min_version": 0,
        "rowidx_start": slot * G,
        "dispatched_at_ms": 1,
    }
    return LedgerTask(**fields | changes)


class Topic:
    """A compacted topic: the newest record of each key, as bytes."""

    def __init__(self) -> None:
        self.newest: dict[bytes, bytes | None] = {}

    def write(self, ledger: Ledger) -> None:
        for key, record in ledger.take_changes():
            self.newest[key] = None if record is None else encode(record)

    def fold(self, first: int = 0) -> Ledger:
        records = [(k, None if v is None else decode(v)) for k, v in self.newest.items()]
        return Ledger.folded(records, first, G)


def test_starts_at_the_first_task_of_the_run():
    ledger = Topic().fold(first=70)
    assert ledger.is_new
    assert ledger.totals.next_task_index == 70


def test_a_task_that_is_not_the_next_is_refused():
    with pytest.raises(ValueError, match="task 5 is not the next, 0"):
        Ledger(0, G).add(task_of(5))


def test_changes_are_given_once_and_an_ended_task_is_a_tombstone():
    ledger = Ledger(0, G)
    ledger.add(task_of(0))
    ledger.add(task_of(1))
    assert [key for key, _ in ledger.take_changes()] == [b"0", TOTALS_KEY, b"1"]
    assert ledger.take_changes() == []
    ledger.abandon(0, "gym_error")
    assert dict(ledger.take_changes())[b"0"] is None


def test_accepted_slots_stay_covered_and_abandoned_ones_do_not():
    ledger = Ledger(0, G)
    for slot in range(3):
        ledger.add(task_of(slot, target=2, slot=slot))
    ledger.accept(2)
    ledger.abandon(1, "gym_error")
    assert ledger.covered() == {2: 0b101}


def test_trained_targets_are_forgotten():
    ledger = Ledger(0, G)
    for index in range(2):
        ledger.add(task_of(index, target=index))
        ledger.accept(index)
    ledger.note(short_targets={"0": 1, "1": 1})
    ledger.forget_targets_below(1)
    assert list(ledger.totals.filled_slots) == ["1"]
    assert ledger.totals.short_targets == {"1": 1}


def test_an_accepted_task_ends_a_row_of_failures():
    ledger = Ledger(0, G)
    for index in range(3):
        ledger.add(task_of(index, slot=index))
    ledger.abandon(0, "gym_error")
    ledger.abandon(1, "deadline")
    assert ledger.totals.failures_in_a_row == 2
    assert ledger.totals.abandoned == {"gym_error": 1, "deadline": 1}
    ledger.accept(2)
    assert ledger.totals.failures_in_a_row == 0


def test_lowest_ordinals_are_by_partition():
    ledger = Ledger(4, G)
    for index in range(4, 9):
        ledger.add(task_of(index, slot=index))
    ledger.accept(4)
    assert ledger.lowest_ordinals(3) == {2: 1, 0: 2, 1: 2}


def test_a_ledger_that_does_not_add_up_is_refused():
    totals = LedgerTotals(next_task_index=2, dispatched=2, accepted=0)
    with pytest.raises(LedgerBroken, match="dispatched 2, accepted 0"):
        Ledger.folded([(TOTALS_KEY, totals), (b"0", task_of(0))], 0, G)


@given(st.lists(st.tuples(st.sampled_from(["add", "accept", "abandon"]), st.booleans())))
def test_is_what_was_committed_whatever_crashes(steps):
    topic = Topic()
    ledger = topic.fold()
    for step, crashes in steps:
        if step == "add":
            index = ledger.totals.next_task_index
            ledger.add(task_of(index, target=index // 3, slot=index % 3))
        elif ledger.tasks and step == "accept":
            ledger.accept(max(ledger.tasks))
        elif ledger.tasks:
            ledger.abandon(min(ledger.tasks), "gym_error")
        ledger.require_sums()
        if crashes:
            ledger = topic.fold()
        else:
            topic.write(ledger)
            again = topic.fold()
            assert again.tasks == ledger.tasks
            assert again.totals == ledger.totals
