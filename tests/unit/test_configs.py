"""Every configuration that ships is one that the product takes."""

from pathlib import Path

import pytest

from infra.demo_model import DEMO_AGENTS
from schemas.config_file import load_config

CONFIGS = sorted(Path("infra/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_loads(path):
    config = load_config(path)
    assert set(config.shard_of_agent) == set(config.env.agents)


def test_there_are_the_three_of_the_readme():
    assert {path.stem for path in CONFIGS} >= {"demo", "smollm2", "gpu"}


def test_the_demo_has_two_shards_with_agents_of_their_own():
    config = load_config("infra/configs/demo.yaml")
    assert [shard.agents for shard in config.all_shards.values()] == [["sums"], ["products"]]


def test_the_demo_model_was_warmed_up_on_the_tasks_of_its_gyms():
    agents = load_config("infra/configs/demo.yaml").env.agents
    assert {name: agent.settings for name, agent in agents.items()} == DEMO_AGENTS


def test_the_demo_takes_settings_from_the_command_line():
    config = load_config("infra/configs/demo.yaml", ["grpo.max_num_steps=20", "grpo.seed=3"])
    assert (config.grpo.max_num_steps, config.grpo.seed) == (20, 3)
