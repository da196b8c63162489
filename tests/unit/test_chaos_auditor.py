"""What a chaos run counts as a failure."""

from collections import Counter
from dataclasses import replace

import pytest

from infra.audit import Audit
from tests.chaos.auditor import sum_flaws, sums_of
from tests.chaos.deeds import Deed, Deeds
from tests.chaos.schedule import Action
from tests.chaos.story import Story

CLOSED = Audit(
    dispatched=10,
    accepted=8,
    abandoned={"gym_error": 2},
    outstanding=0,
    lost=0,
    doubled=0,
    out_of_order=0,
    rows=40,
    groups=8,
    trained_steps=1,
    problems=[],
)


def test_closed_sums_are_no_flaw():
    assert sum_flaws(CLOSED) == []


@pytest.mark.parametrize(
    ("changed", "flaw"),
    [
        ({"outstanding": 1}, "outstanding is 1, not 0"),
        ({"lost": 2}, "lost is 2, not 0"),
        ({"doubled": 3}, "doubled is 3, not 0"),
        ({"out_of_order": 4}, "out of order is 4, not 0"),
        ({"groups": 9}, "8 tasks were accepted, `groups` has 9 groups"),
        (
            {"accepted": 7, "groups": 7},
            "7 accepted and 2 abandoned tasks are not the 10 that were dispatched",
        ),
    ],
)
def test_each_sum_that_does_not_close_is_one(changed, flaw):
    assert sum_flaws(replace(CLOSED, **changed)) == [flaw]


def test_a_run_that_did_nothing_is_one():
    idle = replace(CLOSED, dispatched=0, accepted=0, abandoned={}, groups=0)
    assert sum_flaws(idle) == ["no group was accepted"]


def test_the_sums_have_every_figure():
    story = Story(
        kinds=Counter(duplicate=3, late=2),
        accepted_ms=[1500, 4000],
        failed=Counter(stale=1),
        letters=Counter(wrong_stamp=1),
    )
    sums = sums_of(CLOSED, story, [Deed(1000, Action.KILL, "a"), Deed(2000, Action.CUT, "b")])
    assert sums["duplicates_dropped"] == 3
    assert sums["late_rows"] == 2
    assert sums["attempts_failed"] == {"stale": 1}
    assert sums["dead_letters"] == {"wrong_stamp": 1}
    assert sums["longest_recovery_s"] == 2.0
    assert sums["recovery_s"] == {"kill": 0.5, "cut": 2.0}


def test_every_deed_is_counted_and_written(tmp_path):
    deeds = Deeds(tmp_path / "faults.jsonl")
    deeds.note(Action.KILL, "trainer")
    deeds.note(Action.STOP, "trainer", 7.0)
    deeds.note(Action.KILL, "dispatcher")
    assert deeds.counts == dict.fromkeys(Action, 0) | {"kill": 2, "stop": 1}
    assert len(deeds.journal.read_text().splitlines()) == 3
    assert deeds.done[1].end_ms - deeds.done[1].at_ms == 7000
