"""The gyms of one shard, each built once for all of its agents, and the engine behind them."""

import asyncio
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from producers.generation.engine import Engine
from producers.generation.generation import EngineSettings
from producers.generation.policy_model import PolicyModel, Sampling
from producers.generation.tokens import Tokens
from producers.gyms.protocol import Gym, GymClass, load_gym
from schemas.config import Config

START_S = 600.0


@dataclass
class Hosted:
    """`gyms` by agent; several agents may share one."""

    gyms: dict[str, Gym] = field(default_factory=dict)
    engine: Engine | None = None

    @property
    def instances(self) -> list[Gym]:
        return list({id(gym): gym for gym in self.gyms.values()}.values())


async def host(config: Config, shard: str, replica: int, hosted: Hosted) -> None:
    """Fills `hosted`, step by step, so that what was begun can be closed. Raises ConfigError.

    A gym class with `needs_engine = False` is given None for its model; a shard of only such gyms
    loads no model.
    """
    classes = await asyncio.to_thread(_classes, config, shard)  # imports can take seconds
    model: PolicyModel | None = None
    if any(getattr(gym_class, "needs_engine", True) for gym_class in classes.values()):
        hosted.engine = Engine()
        model = await _model(config, shard, replica, hosted.engine)
    for path, agents in _agents_by_gym(config, shard).items():
        settings = {agent: config.env.agents[agent].settings for agent in agents}
        gym = classes[path](tuple(agents), cast(PolicyModel, model), settings)
        hosted.gyms |= dict.fromkeys(agents, gym)


def _agents_by_gym(config: Config, shard: str) -> dict[str, list[str]]:
    by_gym: dict[str, list[str]] = defaultdict(list)
    for agent in config.all_shards[shard].agents:
        by_gym[config.env.agents[agent].gym].append(agent)
    return by_gym


def _classes(config: Config, shard: str) -> dict[str, GymClass]:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not have it, `python -m` does
        sys.path.insert(0, here)
    return {path: load_gym(path) for path in _agents_by_gym(config, shard)}


async def _model(config: Config, shard: str, replica: int, engine: Engine) -> PolicyModel:
    """The model of policy.model_name, as version -1: the first announced version replaces it, and
    nothing is generated before."""
    directory = config.policy.model_name
    tokens = await asyncio.to_thread(Tokens, directory)
    await engine.start(
        directory, engine_settings(config, shard, replica), version=-1, deadline_s=START_S
    )
    generation = config.policy.generation
    sampling = Sampling(generation.max_new_tokens, generation.temperature, generation.top_p)
    return PolicyModel(engine, tokens, sampling)


def engine_settings(config: Config, shard: str, replica: int) -> EngineSettings:
    vllm: Any = config.policy.generation.vllm_cfg
    return EngineSettings(
        max_model_len=vllm.max_model_len or config.policy.max_total_sequence_length,
        precision=vllm.precision,
        # Replicas with one seed would sample the same answer to the same prompt.
        seed=zlib.crc32(f"{config.grpo.seed}/{shard}/{replica}".encode()) & 0x7FFFFFFF,
        max_num_seqs=vllm.max_num_seqs,
        kv_cache_gib=vllm.kv_cache_gib,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        enforce_eager=vllm.enforce_eager,
    )
