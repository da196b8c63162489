"""Each abandoned task is explained by the gym's script or by a fault; nothing ends twice."""

import pytest

from infra.inspection.letters import letter_of
from infra.inspection.stored import Place, Stored
from schemas import topics as keys
from schemas.records import EventKind, GroupEvent
from tests.chaos.deeds import Deed
from tests.chaos.gym import Script
from tests.chaos.schedule import Action
from tests.chaos.story import AFTERMATH_MS, OUTAGE_MS, Story, longest_recovery_s, recoveries_s

USUAL = Script(fails=False, is_stale=False, is_slow=False)
FAILS = Script(fails=True, is_stale=False, is_slow=False)
STALE = Script(fails=False, is_stale=True, is_slow=False)
STOP = Deed(1000, Action.STOP, "gym-shard-shard-0-0", 10.0)
AFTER = STOP.end_ms + AFTERMATH_MS + 1
BROKER = Deed(1000, Action.BROKER, "broker")
BROKER_AFTER = BROKER.end_ms + OUTAGE_MS + AFTERMATH_MS + 1


def event(kind, task=5, attempt=0, reason=""):
    return GroupEvent(
        run_id="r",
        task_index=task,
        attempt=attempt,
        group_size=4,
        target_step=1,
        stamp=b"",
        kind=kind,
        reason=reason,
        at_ms=0,
    )


def abandoned(*reasons, at_ms=2000):
    """A task whose attempts failed for these reasons, and which was then given up."""
    story = Story()
    for attempt, reason in enumerate(reasons):
        story.enter_event(event(EventKind.ATTEMPT_FAILED, attempt=attempt, reason=reason), at_ms)
    story.enter_event(event(EventKind.ABANDONED, reason=reasons[-1]), at_ms)
    return story


def flaws(story, script=USUAL, deeds=()):
    return story.flaws(lambda task, attempt: script, list(deeds))


def test_a_story_without_trouble_has_no_flaw():
    story = Story()
    story.enter_event(event(EventKind.STARTED), 1)
    story.enter_event(event(EventKind.ACCEPTED), 2)
    assert flaws(story) == []
    assert story.accepted_ms == [2]


@pytest.mark.parametrize("kinds", [("ACCEPTED", "ACCEPTED"), ("ABANDONED", "ACCEPTED")])
def test_two_terminal_events_are_one(kinds):
    story = Story()
    story.enter_event(event(EventKind.ATTEMPT_FAILED, reason="gym_error"), 1)
    for kind in kinds:
        story.enter_event(event(EventKind[kind], reason="gym_error"), 2)
    assert "task 5 has 2 terminal events" in flaws(story, FAILS)


def test_dead_letters_are_flaws_and_twice_the_same_is_another():
    story = Story()
    headers = {
        keys.DLQ_REASON: b"wrong_stamp",
        keys.DLQ_TOPIC: b"r.rows",
        keys.DLQ_PARTITION: b"0",
        keys.DLQ_OFFSET: b"7",
    }
    for offset in range(2):
        story.enter_letter(letter(offset, headers))
    assert flaws(story) == [
        "2 records are in dlq: wrong_stamp",
        "the record ('r.rows', 0, 7) is in dlq 2 times",
    ]


def test_dead_letters_without_headers_are_flaws_but_not_twice_the_same():
    story = Story()
    for offset in range(2):
        story.enter_letter(letter(offset, {}))
    assert flaws(story) == ["2 records are in dlq: unlabelled"]


def letter(offset, headers):
    return letter_of(Stored(Place(0, offset), 0, None, b"value", headers))


@pytest.mark.parametrize(
    ("story", "script", "deeds", "explained"),
    [
        (abandoned("gym_error"), FAILS, [], True),
        (abandoned("gym_error"), USUAL, [STOP], False),
        (abandoned("stale"), STALE, [], True),
        (abandoned("stale"), USUAL, [], False),
        (abandoned("shard_lost", "deadline", "lost_start"), USUAL, [STOP], True),
        (abandoned("shard_lost"), USUAL, [], False),
        (abandoned("shard_lost", at_ms=AFTER), USUAL, [STOP], False),
        (abandoned("shard_lost", at_ms=999), USUAL, [STOP], False),
        (abandoned("shard_lost", "gym_error"), USUAL, [STOP], False),
        (abandoned("gym_protocol"), FAILS, [STOP], False),
        (abandoned("lost_start", at_ms=BROKER_AFTER - 1), USUAL, [BROKER], True),
        (abandoned("lost_start", at_ms=BROKER_AFTER), USUAL, [BROKER], False),
    ],
)
def test_an_abandoned_task_needs_a_reason_for_every_failure(story, script, deeds, explained):
    assert (flaws(story, script, deeds) == []) is explained


def test_a_failed_attempt_of_an_accepted_task_needs_a_reason_too():
    story = Story()
    story.enter_event(event(EventKind.ATTEMPT_FAILED, reason="lost_start"), 2000)
    story.enter_event(event(EventKind.ACCEPTED, attempt=1), 3000)
    assert flaws(story, USUAL, [STOP]) == []
    assert flaws(story) == ["task 5 attempt 0 failed, unexplained: lost_start: "]


def test_an_abandonment_for_no_known_failure_is_one():
    story = Story()
    story.enter_event(event(EventKind.ABANDONED, reason="too_large"), 1)
    assert flaws(story, FAILS, [STOP]) == [
        "task 5 was abandoned (too_large), unexplained: no attempt failed for the reason too_large"
    ]


def test_recovery_counts_from_each_fault_to_the_next_accepted_group():
    assert longest_recovery_s([1000, 5000, 9000], [900, 5250, 2500]) == 1.5
    assert longest_recovery_s([9000], [900]) is None
    assert longest_recovery_s([], [900]) is None


def test_recovery_is_told_for_each_kind_of_fault():
    deeds = [STOP, Deed(3000, Action.KILL, "a"), Deed(5000, Action.KILL, "b")]
    assert recoveries_s(deeds, [1100, 3500, 4000]) == {"stop": 0.1, "kill": 0.5}
