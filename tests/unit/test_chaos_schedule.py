"""The faults of a chaos run: repeatable, inside their time, each stop long enough to matter."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.gym import FAILS_ALWAYS, FAILS_ONCE, fails_now
from tests.chaos.schedule import MODES, MOST_STOPPED, SESSION_S, Action, make_schedule

ROLES = [
    *("dispatcher", "gym-shard-one-0", "gym-shard-two-0"),
    *("assembler-0", "assembler-1", "trainer"),
]
seeds = st.integers(0, 2**32)
lengths = st.integers(1, 400)
modes = st.sampled_from(sorted(MODES))


@given(seeds, lengths, modes)
def test_a_seed_gives_the_same_faults_in_order_and_in_time(seed, seconds, mode):
    faults = make_schedule(seed, seconds, ROLES, mode)
    assert faults == make_schedule(seed, seconds, ROLES, mode)
    assert faults == sorted(faults, key=lambda fault: fault.at_s)
    assert all(fault.at_s > 0 and fault.end_s <= seconds for fault in faults)


@given(seeds, lengths, modes)
def test_a_stop_outlasts_the_session_and_nobody_is_touched_meanwhile(seed, seconds, mode):
    faults = make_schedule(seed, seconds, ROLES, mode)
    stops = [fault for fault in faults if fault.action in (Action.STOP, Action.REPLACE)]
    assert all(stop.for_s > SESSION_S for stop in stops)
    for stop in stops:
        during = [f for f in faults if f is not stop and stop.at_s <= f.at_s <= stop.end_s]
        assert stop.role not in {fault.role for fault in during}
        others = [s for s in stops if s.at_s <= stop.at_s <= s.end_s]
        assert len(others) <= MOST_STOPPED


def test_another_seed_gives_other_faults():
    assert make_schedule(7, 60, ROLES, "mixed") != make_schedule(8, 60, ROLES, "mixed")


@pytest.mark.parametrize(("seconds", "restarts"), [(25, 1), (60, 1), (90, 2), (300, 7)])
def test_the_broker_is_restarted_once_or_twice_a_minute(seconds, restarts):
    faults = make_schedule(7, seconds, ROLES, "mixed")
    assert sum(fault.action is Action.BROKER for fault in faults) == restarts


def test_every_role_is_killed_and_stopped_about_every_three_seconds():
    faults = make_schedule(7, 3000, ROLES, "mixed")
    hit = [fault for fault in faults if fault.action is not Action.BROKER]
    assert 900 < len(hit) < 1100
    for action in (Action.KILL, Action.STOP, Action.REPLACE):
        assert {fault.role for fault in hit if fault.action is action} == set(ROLES)


@pytest.mark.parametrize(
    ("mode", "actions"),
    [
        ("mixed", set(Action)),
        ("kill", {Action.KILL}),
        ("stop", {Action.STOP, Action.REPLACE}),
        ("broker", {Action.BROKER}),
        ("quiet", set()),
    ],
)
def test_a_mode_has_its_own_faults(mode, actions):
    found = Counter(fault.action for fault in make_schedule(7, 200, ROLES, mode))
    assert set(found) == actions


@given(st.floats(0, 1), st.integers(0, 5))
def test_a_task_of_the_gym_fails_never_once_or_always(share, attempt):
    once = FAILS_ALWAYS <= share < FAILS_ALWAYS + FAILS_ONCE
    expected = share < FAILS_ALWAYS or (once and attempt == 0)
    assert fails_now(share, attempt) is expected
