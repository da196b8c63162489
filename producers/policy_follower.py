"""Loads every new policy version that `control` announces, as soon as it does."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from producers.control_watch import ControlWatch
from producers.generation.engine import Engine
from schemas.config import Config
from schemas.errors import ConfigError
from schemas.records import PolicyVersion

logger = logging.getLogger(__name__)

LOAD_S = 600.0
GONE_S = 10.0


@dataclass(frozen=True)
class LoadOptions:
    in_flight: bool
    """Generations go on under the new weights"""
    recompute_kv_cache: bool
    deadline_s: float

    @classmethod
    def of(cls, config: Config) -> "LoadOptions":
        asynchronous = config.grpo.async_grpo
        in_flight = asynchronous.in_flight_weight_updates
        return cls(
            in_flight=in_flight,
            recompute_kv_cache=asynchronous.recompute_kv_cache_after_weight_updates,
            # Without updates in flight, what is being generated ends first.
            deadline_s=LOAD_S + (0 if in_flight else config.env.attempt_deadline_s),
        )


class PolicyFollower:
    """`version` is the loaded policy version, -1 before the first. Without an engine, announced is
    loaded."""

    def __init__(
        self,
        watch: ControlWatch,
        engine: Engine | None,
        options: LoadOptions,
        on_loaded: Callable[[], None],
    ) -> None:
        self.version = -1
        self._watch = watch
        self._engine = engine
        self._options = options
        self._on_loaded = on_loaded

    async def run(self) -> None:
        """Until cancelled. Raises what loading raises; the engine cannot go on after that."""
        while True:
            self._watch.changed.clear()
            policy = self._watch.state.policy
            if policy is None or policy.version <= self.version:
                await self._watch.changed.wait()
            else:
                await self._load(policy)

    async def _load(self, policy: PolicyVersion) -> None:
        if self._engine is not None:
            if not await asyncio.to_thread(Path(policy.weights_dir).is_dir):
                await self._superseded(policy)
                return
            await self._engine.load_weights(
                policy.weights_dir,
                policy.version,
                deadline_s=self._options.deadline_s,
                in_flight=self._options.in_flight,
                recompute_kv_cache=self._options.recompute_kv_cache,
            )
        self.version = policy.version
        logger.info("policy version %d is loaded", policy.version)
        self._on_loaded()

    async def _superseded(self, policy: PolicyVersion) -> None:
        """Old weights are deleted after a newer version is announced. Raises ConfigError where
        there is none."""
        try:
            await asyncio.wait_for(self._watch.changed.wait(), GONE_S)
        except TimeoutError:
            raise ConfigError(
                f"policy version {policy.version}: its weights {policy.weights_dir} are no "
                "directory on this host; is run.directory the same for trainer and shards, on a "
                "file system that both see?"
            ) from None
