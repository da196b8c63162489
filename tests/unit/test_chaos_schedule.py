"""The faults of a chaos run: repeatable, inside their time, each stop long enough to matter."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.gym import FAILS_ALWAYS, FAILS_ONCE, fails_now
from tests.chaos.schedule import (
    BROKER,
    EVERYONE,
    JUMP_S,
    LASTING,
    MODES,
    MOST_HELD,
    NETWORK,
    NETWORK_S,
    SESSION_S,
    Action,
    Plan,
    make_schedule,
)

ROLES = [
    *("dispatcher", "gym-shard-shard-0-0", "gym-shard-shard-1-0"),
    *("assembler-0", "assembler-1", "trainer"),
]
OF_BROKER = (Action.BROKER, Action.DISK)
plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    seconds=st.integers(1, 400),
    mode=st.sampled_from(sorted(MODES)),
    roles=st.just(ROLES),
    gap_s=st.integers(1, 20),
    broker_restarts=st.none() | st.integers(0, 5),
    disk=st.booleans(),
)


def plan(mode, seconds=60, **rest):
    return Plan(7, seconds, mode, ROLES, **rest)


@given(plans)
def test_a_seed_gives_the_same_faults_in_order_and_in_time(drawn):
    faults = make_schedule(drawn)
    assert faults == make_schedule(drawn)
    assert faults == sorted(faults, key=lambda fault: fault.at_s)
    assert all(fault.at_s > 0 and fault.end_s <= drawn.seconds for fault in faults)


@given(plans)
def test_a_stop_outlasts_the_session_and_nobody_is_touched_meanwhile(drawn):
    faults = make_schedule(drawn)
    lasting = [fault for fault in faults if fault.action in LASTING]
    for held in lasting:
        assert held.action in NETWORK or held.for_s > SESSION_S
        during = [
            fault
            for fault in faults
            if fault is not held
            and held.at_s <= fault.at_s <= held.end_s
            and fault.action not in OF_BROKER
        ]
        assert held.role != EVERYONE or not during
        assert held.role not in {fault.role for fault in during}
        assert len([f for f in lasting if f.at_s <= held.at_s <= f.end_s]) <= MOST_HELD


@given(plans)
def test_the_network_goes_for_seconds_and_clocks_jump_by_minutes_or_hours(drawn):
    for fault in make_schedule(drawn):
        if fault.action in NETWORK:
            assert NETWORK_S[0] <= fault.for_s <= NETWORK_S[1]
        if fault.action is Action.CLOCK:
            assert JUMP_S[0] <= abs(fault.shift_s) <= JUMP_S[1]
        else:
            assert fault.shift_s == 0


@given(plans)
def test_without_a_disk_the_other_faults_are_the_same(drawn):
    with_disk = make_schedule(replace(drawn, disk=True))
    without = make_schedule(replace(drawn, disk=False))
    assert without == [fault for fault in with_disk if fault.action is not Action.DISK]


def test_another_seed_gives_other_faults():
    assert make_schedule(plan("mixed")) != make_schedule(replace(plan("mixed"), seed=8))


@pytest.mark.parametrize(("seconds", "restarts", "full"), [(25, 1, 1), (90, 2, 1), (300, 7, 3)])
def test_the_broker_dies_of_a_kill_and_of_its_disk(seconds, restarts, full):
    found = Counter(fault.action for fault in make_schedule(plan("mixed", seconds)))
    assert (found[Action.BROKER], found[Action.DISK]) == (restarts, full)


@pytest.mark.parametrize("mode", ["kill", "mixed", "quiet"])
def test_as_many_restarts_of_the_broker_as_asked_for(mode):
    faults = make_schedule(plan(mode, 300, broker_restarts=2))
    assert [f.role for f in faults if f.action is Action.BROKER] == [BROKER] * 2


def test_faults_of_roles_come_at_the_asked_pace():
    kills = make_schedule(plan("kill", 3000, gap_s=3))
    assert 900 < len(kills) < 1100
    assert 230 < len(make_schedule(plan("kill", 3000, gap_s=12))) < 270
    gaps = [after.at_s - before.at_s for before, after in pairwise(kills)]
    assert min(gaps) >= 2
    assert max(gaps) <= 4


def test_every_role_gets_every_fault_of_roles():
    faults = make_schedule(plan("mixed", 6000))
    for action in set(Action) - set(OF_BROKER):
        expected = {*ROLES, EVERYONE} if action in NETWORK else set(ROLES)
        assert {fault.role for fault in faults if fault.action is action} == expected


@pytest.mark.parametrize(
    ("mode", "actions"),
    [
        ("mixed", set(Action)),
        ("kill", {Action.KILL}),
        ("stop", {Action.STOP, Action.REPLACE}),
        ("broker", {Action.BROKER}),
        ("network", set(NETWORK)),
        ("disk", {Action.DISK}),
        ("clock", {Action.CLOCK}),
        ("quiet", set()),
    ],
)
def test_a_mode_has_its_own_faults(mode, actions):
    assert {fault.action for fault in make_schedule(plan(mode, 400))} == actions


@given(st.floats(0, 1), st.integers(0, 5))
def test_a_task_of_the_gym_fails_never_once_or_always(share, attempt):
    once = FAILS_ALWAYS <= share < FAILS_ALWAYS + FAILS_ONCE
    expected = share < FAILS_ALWAYS or (once and attempt == 0)
    assert fails_now(share, attempt) is expected
