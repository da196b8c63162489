"""What a chaos run counts as a failure, and the words of its command line."""

from dataclasses import replace

import pytest

from infra.audit import Audit
from tests.chaos.auditor import longest_recovery_s, sum_flaws
from tests.chaos.settings import BadSetting, Settings

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
        ({"accepted": 7}, "7 accepted and 2 abandoned tasks are not the 10 that were dispatched"),
    ],
)
def test_each_sum_that_does_not_close_is_one(changed, flaw):
    assert sum_flaws(replace(CLOSED, **changed)) == [flaw]


def test_a_run_that_did_nothing_is_one():
    idle = replace(CLOSED, dispatched=0, accepted=0, abandoned={})
    assert sum_flaws(idle) == ["no group was accepted"]


def test_recovery_counts_from_each_kill_to_the_next_accepted_group():
    assert longest_recovery_s([1000, 5000, 9000], [900, 5250, 2500]) == 1.5
    assert longest_recovery_s([9000], [900]) is None
    assert longest_recovery_s([], [900]) is None


def test_settings_of_the_command_line():
    settings = Settings.parsed(["seed=3", "seconds=25", "mode=kill"])
    assert (settings.seed, settings.seconds, settings.mode, settings.steps) == (3, 25, "kill", 0)
    assert settings.replay == 'make chaos CHAOS="seed=3 seconds=25 mode=kill"'


@pytest.mark.parametrize("settings", [Settings(), Settings(0, 1, "quiet"), Settings(steps=250)])
def test_the_words_of_a_replay_give_the_same_settings(settings):
    assert Settings.parsed(settings.replay.split('"')[1].split()) == settings


@pytest.mark.parametrize("argument", ["sed=3", "seed=x", "mode=wild", "seconds=", "7"])
def test_a_wrong_setting_is_named_with_the_known_ones(argument):
    with pytest.raises(BadSetting, match=r"is no setting; known are seed, seconds"):
        Settings.parsed([argument])
