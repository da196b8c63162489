import asyncio

import pytest

from producers.hosting import Hosted, engine_settings, host
from schemas.config import Config
from schemas.errors import ConfigError

TINY = "tests.integration.tiny_gym:TinyGym"


def config(gym=TINY, **policy):
    return Config.model_validate(
        {
            "run": {"id": "r"},
            "data": {"train_jsonl_fpath": "none"},
            "policy": {"model_name": "/nowhere", "max_total_sequence_length": 96} | policy,
            "env": {
                "agents": {
                    "sums": {"gym": gym, "settings": {"digits": 1}},
                    "products": {"gym": gym},
                    "elsewhere": {"gym": "no.such:Gym"},
                }
            },
            "shards": {
                "left": {"agents": ["sums", "products"], "replicas": 2},
                "right": {"agents": ["elsewhere"]},
            },
        }
    )


def hosted(settings, shard):
    found = Hosted()
    asyncio.run(host(settings, shard, 0, found))
    return found


def test_agents_of_one_class_share_a_gym_and_need_no_model_unless_it_does():
    found = hosted(config(), "left")
    assert sorted(found.gyms) == ["products", "sums"]
    (gym,) = found.instances
    assert gym.agents == ("sums", "products")
    assert gym.settings == {"sums": {"digits": 1}, "products": {}}
    assert found.engine is None


def test_a_gym_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"no\.such:Gym"):
        hosted(config(), "right")


def test_a_gym_that_needs_a_model_is_told_where_there_is_none():
    with pytest.raises(ConfigError, match="/nowhere"):
        hosted(config(gym="producers.gyms.reasoning_gym:ReasoningGym"), "left")


def test_replicas_sample_with_seeds_of_their_own():
    seeds = [engine_settings(config(), shard, n).seed for shard, n in
             [("left", 0), ("left", 1), ("right", 0)]]  # fmt: skip
    assert len(set(seeds)) == 3
    assert engine_settings(config(), "left", 0).seed == seeds[0]


def test_the_context_is_the_engines_own_or_the_policys():
    assert engine_settings(config(), "left", 0).max_model_len == 96
    own = config(generation={"vllm_cfg": {"max_model_len": 48}})
    assert engine_settings(own, "left", 0).max_model_len == 48
