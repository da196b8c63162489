"""The line that says for whom a step waits."""

from typing import Any

from schemas.records import LedgerTask, LedgerTotals, Purpose, TaskState
from trainer.awaited import Ledger, awaited


def task(index: int, **changes: Any) -> LedgerTask:
    fields: dict[str, Any] = {
        "task_index": index,
        "attempt": 0,
        "target_step": 7,
        "epoch": 0,
        "position": index,
        "agent": "sums",
        "shard": "sums",
        "replica": 0,
        "partition": 0,
        "seq": 0,
        "min_version": 6,
        "rowidx_start": 0,
        "dispatched_at_ms": 1_000,
    }
    return LedgerTask(**fields | changes)


def test_names_each_missing_task_with_shard_attempt_and_age():
    text = awaited(7, [60, 62], 3, [task(60), task(61, attempt=2, replica=1)], now_ms=13_500)
    assert text == ("step 7: 2 of 3 groups; waiting for task 61 (shard sums/1, attempt 2, 12 s)")


def test_says_why_a_task_is_not_running():
    waiting = task(61, state=TaskState.WAITING, reason="gym_error")
    assert "task 61 (shard sums/0, attempt 0, 1 s, waiting: gym_error)" in awaited(
        7, [], 1, [waiting], now_ms=2_000
    )


def test_counts_what_it_does_not_name():
    text = awaited(7, [], 8, [task(index) for index in range(6)], now_ms=1_000)
    assert text.endswith(", 2 more, 2 not dispatched")
    assert text.count("shard") == 4


def test_without_a_ledger_it_still_counts():
    assert awaited(0, [1], 2, [], now_ms=0) == "step 0: 1 of 2 groups; waiting for 1 not dispatched"


def test_the_ledger_keeps_outstanding_training_tasks_of_the_step():
    ledger = Ledger()
    ledger.apply("totals", LedgerTotals(next_task_index=9))
    ledger.apply("8", task(8))
    ledger.apply("5", task(5))
    ledger.apply("6", task(6, target_step=8))
    ledger.apply("7", task(7, purpose=Purpose.VALIDATION))
    ledger.apply("5", task(5, attempt=1))
    assert [(t.task_index, t.attempt) for t in ledger.of_step(7)] == [(5, 1), (8, 0)]
    ledger.apply("8", None)
    assert [t.task_index for t in ledger.of_step(7)] == [5]
