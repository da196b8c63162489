"""What a chaos run is asked for, and the configuration that its roles get."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import orjson
import yaml

from schemas.config import Config
from schemas.config_file import load_config
from tests.chaos.recorder import version_file
from tests.chaos.schedule import MODES, SESSION_S

AGENTS = {"sums": "one", "products": "two"}
PROMPTS = 512
EPOCHS = 1_000_000
ROW_BYTES, GROUP_BYTES = 256 << 10, 2 << 20


class BadSetting(Exception):
    """An argument of the command line that means nothing."""


@dataclass(frozen=True)
class Settings:
    """`seconds`: of the schedule. `steps` 0: the data ends when the schedule does."""

    seed: int = 7
    seconds: int = 60
    mode: str = "mixed"
    steps: int = 0

    @classmethod
    def parsed(cls, arguments: Sequence[str]) -> Self:
        """Of `seed=7 seconds=60 ...`. Raises BadSetting."""
        known = {field.name: field.type for field in fields(cls)}
        found: dict[str, Any] = {}
        for argument in arguments:
            name, _, value = argument.partition("=")
            is_mode = name == "mode"
            if name not in known or not (value in MODES if is_mode else value.isdecimal()):
                raise BadSetting(
                    f"{argument!r} is no setting; known are seed, seconds and steps, each a "
                    f"number, and mode, one of {', '.join(MODES)}"
                )
            found[name] = value if is_mode else int(value)
        return cls(**found)

    @property
    def replay(self) -> str:
        """The command that gives this schedule again."""
        given = {name: value for name, value in asdict(self).items() if name != "steps" or value}
        words = " ".join(f"{name}={value}" for name, value in given.items())
        return f'make chaos CHAOS="{words}"'


def write_run(settings: Settings, bootstrap_servers: str, directory: Path) -> tuple[Config, Path]:
    """The configuration and its file; the dataset lies beside it.

    N = 8, G = 4, one step ahead; every timeout is short, so that a minute has many recoveries.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.jsonl"
    prompts.write_bytes(b"\n".join(_prompt(number) for number in range(PROMPTS)))
    file = directory / "chaos.yaml"
    run = {"id": f"chaos-{settings.seed}", "directory": str(directory)}
    version = Path(run["directory"]).absolute() / run["id"] / "version"
    gym = {"seed": settings.seed, "version_file": str(version)}
    file.write_text(
        yaml.safe_dump(
            {
                "run": run,
                "kafka": {
                    "bootstrap_servers": bootstrap_servers,
                    "num_partitions": 4,
                    "session_timeout_ms": int(SESSION_S * 1000),
                    "transaction_timeout_ms": 10_000,
                    "max_row_bytes": ROW_BYTES,
                    "max_group_bytes": GROUP_BYTES,
                },
                "data": {"train_jsonl_fpath": str(prompts)},
                "grpo": {
                    "num_prompts_per_step": 8,
                    "num_generations_per_prompt": 4,
                    "max_num_epochs": EPOCHS,
                    "seed": settings.seed,
                    "async_grpo": {
                        "enabled": True,
                        "max_trajectory_age_steps": 1,
                        "max_generation_failures": 100,
                    },
                }
                | ({"max_num_steps": settings.steps} if settings.steps else {}),
                "loss_fn": {"use_importance_sampling_correction": True},
                "policy": {"model_name": "none"},
                "env": {
                    "attempt_deadline_s": 20.0,
                    "agents": {
                        agent: {"gym": "tests.chaos.gym:ChaosGym", "settings": gym}
                        for agent in AGENTS
                    },
                },
                "shards": {shard: {"agents": [agent]} for agent, shard in AGENTS.items()},
                "checkpointing": {"save_period": 5},
            }
        )
    )
    config = load_config(file)
    assert version_file(config) == version
    return config, file


def _prompt(number: int) -> bytes:
    return orjson.dumps(
        {
            "responses_create_params": {"input": f"{number}+1="},
            "agent_ref": {"name": list(AGENTS)[number % len(AGENTS)]},
        }
    )
