"""The configuration that the roles of a chaos run get, and its dataset."""

from pathlib import Path
from typing import Any

import orjson
import yaml
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from schemas.clients import bootstrap_servers
from schemas.config import Config
from schemas.config_file import load_config
from schemas.topics import Topics
from tests.chaos.recorder import version_file
from tests.chaos.schedule import SESSION_S
from tests.chaos.settings import GROUPS_PER_STEP, Settings

PROMPTS = 512  # of a run whose data ends with the schedule
ENDLESS = 1_000_000  # epochs
ROW_BYTES, GROUP_BYTES = 256 << 10, 2 << 20
ANSWER_S = 30.0


def write_run(settings: Settings, servers: str, directory: Path) -> tuple[Config, Path]:
    """The configuration and its file; the dataset lies beside it.

    N = 8, G = 4, one step ahead; every timeout is short, so that a minute has many recoveries.
    """
    directory.mkdir(parents=True, exist_ok=True)
    agents = [f"agent-{number}" for number in range(settings.shards)]
    prompts = directory / "prompts.jsonl"
    lines = range(settings.prompts or PROMPTS)
    prompts.write_bytes(b"\n".join(_prompt(n, agents[n % len(agents)]) for n in lines))
    run_id = f"chaos-{settings.seed}"
    version = directory.absolute() / run_id / "version"
    gym = {"seed": settings.seed, "version_file": str(version)}
    file = directory / "chaos.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "run": {"id": run_id, "directory": str(directory)},
                "kafka": _kafka(settings, servers),
                "data": {"train_jsonl_fpath": str(prompts)},
                "grpo": _grpo(settings),
                "loss_fn": {"use_importance_sampling_correction": True},
                "policy": {"model_name": "none"},
                "env": {
                    "attempt_deadline_s": 20.0,
                    "agents": {
                        agent: {"gym": "tests.chaos.gym:ChaosGym", "settings": gym}
                        for agent in agents
                    },
                },
                "shards": {
                    f"shard-{number}": {"agents": [agent]} for number, agent in enumerate(agents)
                },
                "checkpointing": {"save_period": 5},
            }
        )
    )
    config = load_config(file)
    assert version_file(config) == version
    return config, file


def shorten_sessions(config: Config) -> None:
    """Of KIP-848 groups, where the broker sets the session's length and not the member."""
    topics = Topics(config.run.id)
    groups = [topics.assembler_group, *map(topics.shard_group, config.all_shards)]
    wanted = {
        "consumer.session.timeout.ms": str(config.kafka.session_timeout_ms),
        "consumer.heartbeat.interval.ms": "1000",
    }
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in wanted.items()
    ]
    changes = [
        ConfigResource(ResourceType.GROUP, group, incremental_configs=entries) for group in groups
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap_servers(config.kafka)})
    for changed in admin.incremental_alter_configs(changes).values():
        changed.result(ANSWER_S)


def _kafka(settings: Settings, servers: str) -> dict[str, Any]:
    return {
        "bootstrap_servers": servers,
        "group_protocol": settings.protocol,
        "num_partitions": 4,
        "session_timeout_ms": int(SESSION_S * 1000),
        "transaction_timeout_ms": 10_000,
        "max_row_bytes": ROW_BYTES,
        "max_group_bytes": GROUP_BYTES,
    }


def _grpo(settings: Settings) -> dict[str, Any]:
    return {
        "num_prompts_per_step": GROUPS_PER_STEP,
        "num_generations_per_prompt": 4,
        "max_num_epochs": 1 if settings.prompts else ENDLESS,
        "seed": settings.seed,
        "async_grpo": {
            "enabled": True,
            "max_trajectory_age_steps": 1,
            "max_generation_failures": 100,
        },
    }


def _prompt(number: int, agent: str) -> bytes:
    return orjson.dumps(
        {
            "responses_create_params": {"input": f"{number}+1="},
            "agent_ref": {"name": agent},
        }
    )
