"""Reads the YAML file: `defaults` files below it, dotted overrides above, errors with a way out."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from schemas.config import Config
from schemas.errors import ConfigError

UNSUPPORTED = {
    "ppo": "groupstream trains with GRPO",
    "sft": "groupstream trains with GRPO",
    "dpo": "groupstream trains with GRPO",
    "distillation": "groupstream trains with GRPO",
    "cluster": "each role is a process of its own; start them where you like",
    "grpo.use_dynamic_sampling": "a step takes exactly the groups of its slots",
    "grpo.dynamic_sampling_max_gen_batches": "a step takes exactly the groups of its slots",
    "grpo.batch_multiplier": "a step takes exactly the groups of its slots",
    "grpo.reward_shaping": "shape rewards in the gym",
    "grpo.reward_scaling": "scale rewards in the gym",
    "grpo.max_rollout_turns": "turns are the gym's business",
    "grpo.val_period": "validation is not supported yet",
    "grpo.val_at_start": "validation is not supported yet",
    "grpo.val_at_end": "validation is not supported yet",
    "grpo.max_val_samples": "validation is not supported yet",
    "grpo.val_batch_size": "validation is not supported yet",
    "grpo.seq_logprob_error_threshold": "use loss_fn.truncated_importance_sampling_type",
    "grpo.invalid_tool_call_advantage": "not supported yet",
    "grpo.malformed_thinking_advantage": "not supported yet",
    "grpo.adv_estimator": "only the grpo estimator: normalize_rewards, use_leave_one_out_baseline",
    "loss_fn.use_cispo": "not supported yet",
    "loss_fn.use_kl_in_reward": "use loss_fn.reference_policy_kl_penalty",
    "loss_fn.positive_example_nll_weight": "not supported yet",
    "policy.dtensor_cfg": "the trainer is Megatron-Core",
    "policy.tokenizer": "the tokenizer of policy.model_name is used",
    "policy.generation.colocated": "generation and training are processes of their own",
    "policy.generation.stop_strings": "stopping is the gym's business",
    "policy.generation.stop_token_ids": "stopping is the gym's business",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """`overrides` are `a.b=value`, as on the command line. Raises ConfigError."""
    try:
        tree = OmegaConf.merge(_load(Path(path), ()), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_config(cast(dict[str, Any], values), str(path))


def parse_config(values: dict[str, Any], source: str) -> Config:
    """Raises ConfigError that lists every wrong key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_line(problem) for problem in error.errors()]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _load(path: Path, above: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in above:
        raise ConfigError(f"{path}: defaults form a circle")
    tree = OmegaConf.load(path)
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of keys at the top")
    below = tree.pop("defaults", None)
    if below is None:
        return tree
    base = _load(path.parent / str(below), (*above, path.resolve()))
    return cast(DictConfig, OmegaConf.merge(base, tree))


def _line(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        if key in UNSUPPORTED:
            return f"{key} is not supported: {UNSUPPORTED[key]}"
        known = _keys_of(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"known: {known}"
        return f"{key} is unknown; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (found {problem['input']!r})" if key and location else message


def _keys_of(location: list[str]) -> list[str]:
    """The keys that the section at `location` knows."""
    model: Any = Config
    for part in location:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        field = model.model_fields.get(part)
        if field is None:
            return []
        sections = [a for a in get_args(field.annotation) if _is_section(a)]
        model = sections[0] if sections else field.annotation
    return sorted(model.model_fields) if _is_section(model) else []


def _is_section(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)
