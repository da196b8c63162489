"""The words of the chaos suite's command line."""

import pytest

from tests.chaos.settings import PROFILES, BadSetting, Settings


def test_settings_of_the_command_line():
    settings = Settings.parsed(["seed=3", "seconds=25", "mode=kill", "broker_restarts=0"])
    assert settings == Settings(seed=3, seconds=25, mode="kill", broker_restarts=0)
    expected = 'make chaos CHAOS="seed=3 seconds=25 mode=kill broker_restarts=0"'
    assert settings.replay == expected


def test_a_profile_is_a_word_for_several_and_what_follows_it_counts():
    long = Settings.parsed(["long", "seed=3"])
    assert long == Settings(
        seed=3, seconds=300, mode="kill", prompts=2000, kill_every=3, broker_restarts=2
    )
    assert Settings.parsed(["short"]).seconds == 25
    assert Settings.parsed(["minute"]) == Settings()


def test_a_fixed_number_of_prompts_lasts_for_most_of_the_schedule():
    long = Settings.parsed(["long"])
    assert long.steps == 250
    assert 0.8 * 300 < long.steps * long.step_s < 300
    assert (Settings().steps, Settings().step_s) == (0, 0.05)
    assert Settings(prompts=2000, seconds=1).step_s == 0.05


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(0, 1, "quiet"),
        Settings(prompts=250, protocol="consumer"),
        Settings(assemblers=3, shards=1, kill_every=9, broker_restarts=0),
        *(Settings.parsed([profile]) for profile in PROFILES),
    ],
)
def test_the_words_of_a_replay_give_the_same_settings(settings):
    assert Settings.parsed(settings.replay.split('"')[1].split()) == settings


@pytest.mark.parametrize(
    "argument",
    ["sed=3", "seed=x", "mode=wild", "seconds=", "7", "protocol=new", "shards=0", "long=1"],
)
def test_a_wrong_setting_is_named_with_the_known_ones(argument):
    with pytest.raises(BadSetting, match=rf"'{argument}' is no setting; known are seed, seconds"):
        Settings.parsed([argument])
