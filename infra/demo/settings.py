"""The demo's settings: a few short names, and every key of the configuration. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ConfigError

SHORT = {
    "seed": "grpo.seed",
    "steps": "grpo.max_num_steps",
    "prompts": "grpo.num_prompts_per_step",
    "generations": "grpo.num_generations_per_prompt",
    "lr": "policy.megatron_cfg.optimizer.lr",
}


@dataclass(frozen=True)
class DemoSettings:
    """`overrides` are dotted ones, as the other commands take them."""

    assemblers: int
    overrides: tuple[str, ...]


def parse_settings(settings: Sequence[str]) -> DemoSettings:
    """`seed=7 steps=20 kafka.num_partitions=8`. Raises ConfigError."""
    assemblers = 1
    overrides = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise ConfigError(f"{setting!r} is no setting: write name=value, as seed=7")
        if name == "assemblers":
            assemblers = _count(name, value)
        elif name in SHORT:
            overrides.append(f"{SHORT[name]}={value}")
        elif "." in name:
            overrides.append(setting)
        else:
            known = ", ".join([*SHORT, "assemblers"])
            raise ConfigError(
                f"{name!r} is no setting of the demo: it takes {known}, and any key of the "
                "configuration with its dots"
            )
    return DemoSettings(assemblers, tuple(overrides))


def _count(name: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}, it must be 1 or more")
    return int(value)
