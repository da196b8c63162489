"""The audit finds what it must: rows that changed, and tasks that were lost or came twice."""

import re

import pytest
from msgspec.structs import replace

from infra.audit.books import Books
from infra.audit.group_check import flaws_of, is_ordered
from schemas.codec import decode_as, encode, encode_group
from schemas.identity import stamp
from schemas.records import (
    AssembledGroup,
    EventKind,
    GroupEvent,
    LedgerTotals,
    Manifest,
    Purpose,
    RolloutRow,
)

KEY = b"k" * 32
MANIFEST = Manifest(
    run_id="r",
    num_partitions=2,
    num_prompts_per_step=2,
    num_generations_per_prompt=2,
    lead=1,
    max_trajectory_age_steps=1,
    dataset_hash="",
    first_step=0,
    first_task_index=0,
    shards={"one": 1},
    stamp_key=KEY,
    max_row_bytes=1 << 20,
    max_group_bytes=1 << 20,
    created_at_ms=0,
)


def identity(task=4, attempt=0, target=2):
    return {
        "run_id": "r",
        "task_index": task,
        "attempt": attempt,
        "group_size": 2,
        "target_step": target,
        "stamp": stamp(
            KEY, "r", task_index=task, attempt=attempt, target_step=target, group_size=2
        ),
    }


def row(index, **more):
    values = {
        **identity(),
        "row_index": index,
        "execution_id": "e",
        "traces": [],
        "rollout_id": f"4-{index}",
        "rowidx": index,
        "agent": "sums",
        "shard": "one",
        "replica": 0,
        "reward": 0.5,
        "version_start": 1,
        "produced_at_ms": 5,
    }
    return RolloutRow(**(values | more))


HEADER = AssembledGroup(
    **identity(), execution_id="e", generation_version=1, accepted_at_ms=9, rows=[]
)


def flaws(rows, *, on_rows=None, header=HEADER, partition=0):
    """`rows` are the group's, `on_rows` those of the `rows` topic where they differ."""
    payload = encode_group(header, [encode(one) for one in rows])
    known = {(*one.cohort, one.row_index): encode(one) for one in (on_rows or rows)}
    group = decode_as(payload, AssembledGroup)
    return flaws_of(group, payload, known, partition, MANIFEST)


def test_a_good_group_has_no_flaw():
    assert flaws([row(0), row(1)]) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda: flaws([row(0), row(1)], on_rows=[row(0), row(1, reward=0.25)]), "its bytes"),
        (lambda: flaws([row(0), row(1)], on_rows=[row(0)]), r"its rows \[1\] are not in `rows`"),
        (lambda: flaws([row(1), row(0)]), r"its rows are \[1, 0\]"),
        (lambda: flaws([row(0)]), r"its rows are \[0\]"),
        (lambda: flaws([row(0), row(1)], partition=1), "in partition 1, not 0"),
        (lambda: flaws([row(0), row(1, execution_id="x")]), "row 1 has execution_id 'x'"),
        (lambda: flaws([row(0), row(1, task_index=6)]), "row 1 has task_index 6"),
        (lambda: flaws([row(0), row(1)], header=replace(HEADER, stamp=b"0" * 8)), "stamp is wrong"),
        (lambda: flaws([row(0), row(1)], header=replace(HEADER, run_id="q")), "of run q"),
    ],
)
def test_flaws_are_named(found, words):
    assert any(re.search(words, flaw) for flaw in found()), found()


def test_order():
    assert is_ordered(replace(HEADER, rows=[row(0), row(1)]))
    assert not is_ordered(replace(HEADER, rows=[row(1), row(0)]))


def event(kind, task):
    return GroupEvent(**identity(task), kind=kind, at_ms=1)


def books(*, accepted=(0, 1, 2), abandoned=(), outstanding=(), groups=None, totals=None):
    made = Books(MANIFEST)
    for task in accepted:
        made.enter_event(event(EventKind.ACCEPTED, task))
    for task in abandoned:
        made.enter_event(event(EventKind.ABANDONED, task))
    for task in accepted if groups is None else groups:
        made.enter_group(task, task // 2, Purpose.TRAIN)
    made.outstanding |= set(outstanding)
    dispatched = len(set(accepted)) + len(abandoned) + len(outstanding)
    made.totals = totals or LedgerTotals(
        next_task_index=dispatched,
        dispatched=dispatched,
        accepted=len(set(accepted)),
        abandoned={"deadline": len(abandoned)} if abandoned else {},
    )
    return made


TRAINED = [(0, [0, 1]), (1, [2])]


def test_a_run_that_kept_its_word():
    audit = books(abandoned=(3,)).close(TRAINED, finished=True)
    assert audit.holds, audit.problems
    assert (audit.dispatched, audit.accepted, audit.abandoned) == (4, 3, {"deadline": 1})
    assert (audit.outstanding, audit.lost, audit.doubled) == (0, 0, 0)


def test_a_stopped_run_may_have_outstanding_tasks():
    audit = books(outstanding=(3,)).close(TRAINED, finished=False)
    assert audit.holds, audit.problems
    assert audit.outstanding == 1


def test_a_step_that_was_trained_again_with_the_same_tasks():
    assert books().close([*TRAINED, (1, [2])], finished=True).holds


def test_a_step_that_was_trained_again_with_other_tasks():
    audit = books().close([*TRAINED, (1, [1])], finished=True)
    assert any("step 1 was trained with [2], then again with [1]" in p for p in audit.problems)


def test_a_dispatched_task_that_ended_nowhere_is_lost():
    totals = LedgerTotals(next_task_index=5, dispatched=5, accepted=5)
    audit = books(totals=totals).close(TRAINED, finished=True)
    assert audit.lost == 2
    assert any("tasks are lost: 3, 4" in problem for problem in audit.problems)


def test_an_accepted_task_without_a_group_is_lost():
    audit = books(groups=(0, 1)).close([(0, [0, 1])], finished=True)
    assert audit.lost == 1


def test_a_group_that_was_deleted_after_it_was_trained_is_not_lost():
    made = books(groups=(2,))
    made.deleted_groups = True
    assert made.close(TRAINED, finished=True).holds


@pytest.mark.parametrize(
    "made",
    [
        lambda: books(groups=(0, 1, 2, 2)),
        lambda: books(accepted=(0, 1, 2, 2), groups=(0, 1, 2)),
        lambda: books(abandoned=(2,)),
    ],
)
def test_a_task_with_two_ends_is_doubled(made):
    assert made().close(TRAINED, finished=False).doubled == 1


def test_a_task_of_two_steps_is_doubled():
    assert books().close([(0, [0, 1]), (1, [1, 2])], finished=True).doubled == 1


def test_a_group_that_no_step_trained():
    audit = books().close([(0, [0, 1])], finished=True)
    assert any("1 accepted groups were never trained: 2" in p for p in audit.problems)
    assert books().close([(0, [0, 1])], finished=False).holds  # its step is still to come


def test_a_ledger_that_does_not_add_up():
    totals = LedgerTotals(next_task_index=3, dispatched=3, accepted=2)
    audit = books(totals=totals).close(TRAINED, finished=True)
    assert any("the ledger does not add up" in problem for problem in audit.problems)


def test_validation_groups_are_not_trained():
    made = books(totals=LedgerTotals(next_task_index=4, dispatched=4, accepted=4))
    made.enter_group(3, 1, Purpose.VALIDATION)
    made.enter_event(event(EventKind.ACCEPTED, 3))
    assert made.close(TRAINED, finished=True).holds
