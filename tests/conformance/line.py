"""A run on a real broker that recorded rollouts go through: shard's execution to training batch."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from producers.execution import Execution, Replica
from producers.gyms.protocol import RolloutRequest, RolloutResult, Timing
from producers.nemo_gym import rollout_result
from producers.row import RowOptions
from producers.row_sink import RowSink
from schemas.codec import decode
from schemas.config import AsyncGRPOConfig, Config
from schemas.identity import key_of
from schemas.records import AssembledGroup, EventKind, GroupEvent, PromptGroup, RolloutRow
from tests.assembling import WAIT_S, Run, assembler
from tests.nemo_rollouts import Record
from tests.prompts import make_group
from tests.rows import make_manifest
from tests.run import create_run, make_config, manifest_fields, read_topic
from trainer.batching import WaitingGroups
from trainer.reader import GroupsReader
from trainer.traces import BatchSettings, TrainingBatch, build_batch

GROUP_SIZE = 5
STEPS = 100  # that may be trained from groups of version 0: each test takes steps of its own
PAD = 7


class Replay:
    """A gym that gives one task's recorded rollouts in their order."""

    agents = ("recorded",)

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    async def run(
        self, group: RolloutRequest
    ) -> AsyncIterator[tuple[int, RolloutResult, Timing | None]]:
        for record in self._records:
            index = record["_ng_rollout_index"]
            name = group.rollout_ids[index]
            yield index, rollout_result(record, name, version_start=0, version_end=0), None


class Line:
    """One assembler runs; `step()` gives a training step that no other test has."""

    def __init__(self, run: Run, running: "Future[None]") -> None:
        self.run = run
        self._running = running
        self._steps = itertools.count()
        self._tasks = itertools.count()

    def step(self) -> int:
        return next(self._steps)

    def play(self, step: int, *groups: Sequence[Record]) -> dict[int, bool]:
        """Executes a task of `step` for each list of records; by task whether it completed."""
        prompts = [
            make_group(self.run.manifest, next(self._tasks), target_step=step, agent="recorded")
            for _ in groups
        ]
        done = asyncio.run(self._execute(prompts, groups))
        return {prompt.task_index: complete for prompt, complete in zip(prompts, done, strict=True)}

    async def _execute(
        self, prompts: Sequence[PromptGroup], groups: Sequence[Sequence[Record]]
    ) -> list[bool]:
        run = self.run
        sink = RowSink(run.config.kafka, run.topics, run.manifest.num_partitions, "conformance")
        try:
            return [
                await Execution(
                    prompt, Replay(records), sink, Replica("gym", 0), RowOptions(), version=0
                ).run()
                for prompt, records in zip(prompts, groups, strict=True)
            ]
        finally:
            await sink.close(WAIT_S)

    def rows(self, task: int) -> list[tuple[RolloutRow, bytes]]:
        """The task's rows as they stand in `rows`, each with its payload."""
        messages = read_topic(self.run.config, self.run.topics.rows)
        payloads = [message.value() for message in messages if message.key() == key_of(task)]
        decoded = [(decode(payload), payload) for payload in payloads]
        return [(row, payload) for row, payload in decoded if isinstance(row, RolloutRow)]

    def batch(self, step: int, size: int) -> tuple[list[AssembledGroup], TrainingBatch]:
        """The `size` groups of `step` as the trainer takes them, and its batch of them."""
        config = self.run.config
        groups = self._groups_of(step, size)
        settings = BatchSettings.from_config(config, pad_token_id=PAD, data_parallel_size=1)
        return groups, build_batch([group.rows for group in groups], settings)

    def _groups_of(self, step: int, size: int) -> list[AssembledGroup]:
        reader = GroupsReader(self.run.config.kafka, self.run.topics)
        try:
            first = reader.first_offsets(self.run.manifest.num_partitions)
            reader.assign(first)
            waiting = WaitingGroups(step, first)
            end = time.monotonic() + WAIT_S
            while (groups := waiting.take(size)) is None:
                assert time.monotonic() < end, f"step {step} has {waiting.arrived()} of {size}"
                self._require_assembler()
                for read in reader.poll(0.1):
                    waiting.add(read)
            return groups
        finally:
            reader.close()

    def failures(self, tasks: set[int]) -> list[GroupEvent]:
        """The `attempt_failed` events of `tasks`, one for each, by task."""
        end = time.monotonic() + WAIT_S
        while True:
            events = self.run.events(EventKind.ATTEMPT_FAILED)
            found = [event for event in events if event.task_index in tasks]
            if len(found) >= len(tasks):
                return sorted(found, key=lambda event: event.task_index)
            assert time.monotonic() < end, f"failed: {found}, expected: {sorted(tasks)}"
            self._require_assembler()
            time.sleep(0.1)

    def _require_assembler(self) -> None:
        if self._running.done():
            self._running.result()
            raise AssertionError("the assembler ended")


@contextmanager
def line_on(bootstrap_servers: str, run_id: str, directory: Path) -> Iterator[Line]:
    config = line_config(bootstrap_servers, run_id, directory)
    manifest = make_manifest(**manifest_fields(config))
    run = Run(config, manifest, create_run(config, manifest))
    with assembler(run) as running:
        yield Line(run, running)


def line_config(bootstrap_servers: str, run_id: str, directory: Path) -> Config:
    """G = 5, and rows as long as the real ones are."""
    config = make_config(bootstrap_servers, run_id, directory)
    ahead = AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=STEPS)
    sizes = {"num_generations_per_prompt": GROUP_SIZE, "async_grpo": ahead}
    return config.model_copy(
        update={
            "grpo": config.grpo.model_copy(update=sizes),
            "policy": config.policy.model_copy(update={"max_total_sequence_length": 2048}),
        }
    )
