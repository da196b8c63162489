"""The gym shard: prompts in, rows out, with the newest policy that `control` announces.

    prompts.<shard> ─▶ PromptSource ─▶ StartOrder ─▶ commit ─▶ Execution ─▶ RowSink ─▶ rows
     (own thread)        reads ahead     a slot is       offset    one task an    (own thread)
                                         free, policy    first     attempt
                                         is loaded
    control ─▶ ControlWatch ─▶ PolicyFollower ─▶ engine (own thread)
     (own thread)     └─ finished, fatal, SIGTERM: everything ends, in order

The event loop runs the gyms and decides; what wakes it is a prompt, a new version, or the end of an
attempt. kill -9 at any point loses the attempts that run: their offsets are committed, so nobody
starts them again, and the dispatcher, who sees another incarnation, sends the next attempt.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

from producers.control_watch import ControlWatch
from producers.execution import Execution, Replica
from producers.hosting import Hosted, host
from producers.policy_follower import LoadOptions, PolicyFollower
from producers.prompt_source import Committed, PromptSource
from producers.row import RowOptions, attempt_failed
from producers.row_sink import RowSink
from producers.start_order import Prompt, StartOrder
from schemas.config import Config
from schemas.errors import ConfigError, DeadlineExceeded
from schemas.manifest import require_manifest
from schemas.records import Manifest, PromptGroup
from schemas.status import Status, reported
from schemas.topics import Topics

logger = logging.getLogger(__name__)

ROLE = "gym-shard"
TICK_S = 0.2
CANCEL_S = 3.0
CLOSE_S = 2.0
ENGINE_CLOSE_S = 5.0


def run(config: Config, *, shard: str, replica: int, stop: threading.Event) -> None:
    """Returns when the run has finished or `stop` is set.

    Raises ConfigError, ManifestMismatch, RunStopped where the run is declared fatal, and Fenced
    where another process is this replica now.
    """
    _check(config, shard, replica)
    topics = Topics(config.run.id)
    with reported(config.kafka, topics, ROLE, f"{shard}/{replica}") as status:
        _run_to_end(GymShard(config, topics, Replica(shard, replica), status, stop).serve())


def _check(config: Config, shard: str, replica: int) -> None:
    known = config.all_shards
    if shard not in known:
        raise ConfigError(f"there is no shard {shard!r}; the configuration has {sorted(known)}")
    if not 0 <= replica < known[shard].replicas:
        raise ConfigError(
            f"shard {shard!r} has no replica {replica}: shards.{shard}.replicas is "
            f"{known[shard].replicas}, and they count from 0"
        )


class GymShard:
    """One replica of a shard. `serve()` once."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        replica: Replica,
        status: Status,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._topics = topics
        self._replica = replica
        self._client_id = f"{topics.run_id}.{ROLE}.{replica.shard}.{replica.number}"
        self._status = status
        self._stop = stop
        self._order = StartOrder(config.all_shards[replica.shard].max_concurrent_groups)
        self._options = RowOptions(
            mask_flagged=config.env.should_mask_flagged_samples,
            keep_full_result=config.logger.wandb.log_nemo_gym_full_result_tables,
        )
        self._hosted = Hosted()
        self._running: dict[asyncio.Task[bool], Execution] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._sink: RowSink | None = None
        self._source: PromptSource | None = None
        self._follower: PolicyFollower | None = None
        self._rows_before = 0
        self._tokens_before = 0
        self._reported_s = time.monotonic()

    async def serve(self) -> None:
        self._changed = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = ControlWatch(self._config.kafka, self._topics, self._client_id)
        work = self._task(self._work(), "work")
        try:
            while not self._stop.is_set():
                self._report()
                if work.done():
                    work.result()
                if self._watch.has_finished():
                    logger.info("the run has finished")
                    break
                await asyncio.wait({work}, timeout=TICK_S)
        finally:
            await self._shut_down()

    async def _work(self) -> None:
        """Ends by an error only, or cancelled."""
        self._status.turn("reading control to its end")
        manifest = require_manifest(await self._watch.read(), self._config)
        self._status.turn(f"loading {self._config.policy.model_name}")
        await host(self._config, self._replica.shard, self._replica.number, self._hosted)
        self._sink = self._row_sink(manifest)
        self._follower = PolicyFollower(
            self._watch,
            self._hosted.engine,
            LoadOptions.of(self._config),
            on_loaded=self._changed.set,
        )
        self._source = PromptSource(
            self._config.kafka,
            self._topics,
            self._replica.shard,
            self._replica.number,
            on_prompt=self._take_in,
            on_drop=self._drop,
            on_committed_seq=self._note_committed,
        )
        parts: set[asyncio.Future[None]] = {
            self._task(self._follower.run(), "policy"),
            self._task(self._start_prompts(self._source, self._follower, self._sink), "start"),
            self._source.failed,
            self._broken,
        }
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    def _row_sink(self, manifest: Manifest) -> RowSink:
        return RowSink(
            self._config.kafka, self._topics, manifest.num_partitions, f"{self._client_id}.rows"
        )

    async def _start_prompts(
        self, source: PromptSource, follower: PolicyFollower, sink: RowSink
    ) -> None:
        while True:
            self._changed.clear()
            while (prompt := self._next(follower.version)) is not None:
                match await source.commit(prompt):
                    case Committed.YES:
                        await self._start(prompt.group, sink, follower.version)
                    case Committed.UNKNOWN:
                        await self._decline(
                            prompt.group, sink, "commit_unknown", "infra",
                            "the commit of its offset gave an error and took effect all the same",
                        )  # fmt: skip
                    case Committed.NO:
                        pass
            await self._changed.wait()

    def _next(self, version: int) -> Prompt | None:
        return self._order.take(
            version=version,
            running=len(self._running),
            runs_alone=any(execution.group.alone for execution in self._running.values()),
        )

    async def _start(self, group: PromptGroup, sink: RowSink, version: int) -> None:
        gym = self._hosted.gyms.get(group.agent)
        if gym is None:
            await self._decline(
                group, sink, "unknown_agent", "data",
                f"agent {group.agent!r} is not hosted here: {sorted(self._hosted.gyms)}",
            )  # fmt: skip
            return
        execution = Execution(group, gym, sink, self._replica, self._options, version=version)
        name = f"task {group.task_index} attempt {group.attempt}"
        task = asyncio.create_task(execution.run(), name=name)
        self._running[task] = execution
        task.add_done_callback(self._ended)
        self._report()

    async def _decline(
        self, group: PromptGroup, sink: RowSink, reason: str, failure_class: str, why: str
    ) -> None:
        """Fails an attempt that never starts."""
        message = f"task {group.task_index} attempt {group.attempt} on {self._name}: {why}"
        logger.warning("attempt failed (%s, %s): %s", reason, failure_class, message)
        self._status.count("attempts_failed")
        word = attempt_failed(
            group,
            execution_id=None,
            reason=reason,
            failure_class=failure_class,
            message=message,
        )
        await (await sink.send(word))

    def _ended(self, task: asyncio.Task[bool]) -> None:
        execution = self._running.pop(task)
        self._rows_before += execution.rows_done
        self._tokens_before += execution.sampled_tokens
        self._changed.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._status.count("groups_done" if task.result() else "attempts_failed")
        elif not self._broken.done():
            self._broken.set_exception(error)

    def _take_in(self, prompt: Prompt) -> None:
        self._order.add(prompt)
        self._changed.set()

    def _drop(self, partition: int) -> None:
        self._order.drop(partition)

    def _note_committed(self, partition: int, seq: int) -> None:
        self._status.committed_seq[str(partition)] = seq

    def _report(self) -> None:
        now_s = time.monotonic()
        executions = list(self._running.values())
        counters = self._status.counters
        if executions:
            counters["generate_s"] = counters.get("generate_s", 0.0) + now_s - self._reported_s
        self._reported_s = now_s
        counters["version"] = self._version
        counters["groups_running"] = len(executions)
        counters["rows_sent"] = self._rows_before + sum(e.rows_done for e in executions)
        counters["rows_in_flight"] = sum(e.group.group_size - e.rows_done for e in executions)
        counters["sampled_tokens"] = self._tokens_before + sum(e.sampled_tokens for e in executions)
        self._status.running = [e.running() for e in executions]
        self._status.turn(self._doing())

    def _doing(self) -> str | None:
        if self._source is None:
            return None  # said where it starts
        if self._running:
            return f"running {len(self._running)} groups"
        awaited = self._order.awaited_version()
        if awaited is not None and awaited > self._version:
            return f"waiting for policy version {awaited} (loaded: {self._version})"
        if not self._source.partitions:
            return "waiting for partitions of prompts"
        return "waiting for prompts"

    @property
    def _version(self) -> int:
        return -1 if self._follower is None else self._follower.version

    @property
    def _name(self) -> str:
        return f"{self._replica.shard}/{self._replica.number}"

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    async def _shut_down(self) -> None:
        """In order, each step with a deadline; what does not end is named and left behind."""
        self._status.turn("stopping")
        await _cancel([*self._tasks, *self._running])
        self._report()
        self._status.turn("stopping")
        await asyncio.gather(
            *(
                _close(f"gym {type(gym).__name__} of {gym.agents}", close(), CLOSE_S)
                for gym in self._hosted.instances
                if (close := getattr(gym, "close", None)) is not None
            )
        )
        parts = [("control", self._watch), ("prompts", self._source), ("rows", self._sink)]
        await asyncio.gather(
            *(_close(name, part.close(CLOSE_S), CLOSE_S + 1) for name, part in parts if part)
        )
        if self._hosted.engine is not None:
            engine = self._hosted.engine.close(deadline_s=ENGINE_CLOSE_S)
            await _close("engine", engine, ENGINE_CLOSE_S + 1)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=CANCEL_S)
    for task in pending:
        logger.error("%s did not end within %g s of its cancellation", task.get_name(), CANCEL_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # raised where it was awaited


async def _close(name: str, closing: Awaitable[None], deadline_s: float) -> None:
    try:
        await asyncio.wait_for(closing, deadline_s)
    except (TimeoutError, DeadlineExceeded) as error:
        logger.error("%s did not close within %g s: %s", name, deadline_s, error)
    except Exception:
        logger.exception("%s failed while it closed", name)


def _run_to_end(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run(), which would wait for ever for a task that ignores its cancellation."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        if left:
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.close()
