"""A run for the trainer alone: its topics, a tiny model, groups as the assembler writes them.

`python -m tests.integration.trainer_runs CONFIG.yaml` is a trainer in a process of its own.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition

from infra.init import init_run
from schemas.clients import consumer_config, producer_config
from schemas.codec import decode, encode
from schemas.config import Config
from schemas.identity import partition_of
from schemas.records import AssembledGroup, Manifest, Purpose, Record, SampledSpan, Trace
from schemas.topics import Topics
from schemas.vectors import logprob_bytes, token_bytes
from tests.rows import execution_of, make_identity, make_row

ROOT = Path(__file__).parents[2]
N, G = 2, 4
VOCAB = 67
PROMPT = 3
DEADLINE_S = 120.0


@dataclass(frozen=True)
class TrainerRun:
    config: Config
    manifest: Manifest

    @property
    def topics(self) -> Topics:
        return Topics(self.config.run.id)

    def group(
        self, task: int, step: int, *, masked: bool = False, purpose: Purpose = Purpose.TRAIN
    ) -> AssembledGroup:
        """G rollouts of random tokens, the same for the same task."""
        return AssembledGroup(
            **make_identity(self.manifest, task, target_step=step, purpose=purpose),
            execution_id=execution_of(task),
            generation_version=max(0, step - 1),
            accepted_at_ms=1,
            rows=[
                make_row(
                    self.manifest,
                    task,
                    row,
                    target_step=step,
                    purpose=purpose,
                    traces=[random_trace(f"{task}-{row}", seed=task * G + row)],
                    reward=float((task + row) % 3 == 0),
                    agent=("sums", "products")[task % 2],
                    masked=masked,
                )
                for row in range(G)
            ],
        )

    def send_groups(self, groups: Iterable[AssembledGroup]) -> None:
        partitions = self.config.kafka.num_partitions
        for group in groups:
            self.send(
                self.topics.groups,
                str(group.task_index),
                group,
                partition_of(group.task_index, partitions),
            )

    def send(self, topic: str, key: str, record: Record | None, partition: int = 0) -> None:
        producer = Producer(producer_config(self.config.kafka, "test"))
        value = None if record is None else encode(record)
        producer.produce(topic, value, key.encode(), partition=partition)
        assert producer.flush(20) == 0

    def records(self, topic: str) -> list[tuple[str, Record]]:
        """What partition 0 of `topic` holds now."""
        settings = consumer_config(self.config.kafka, "test")
        consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
        partition = TopicPartition(topic, 0, 0)
        first, end = consumer.get_watermark_offsets(partition, timeout=20)
        consumer.assign([TopicPartition(topic, 0, first)])
        found: list[tuple[str, Record]] = []
        while consumer.position([partition])[0].offset < end:
            message = consumer.poll(1.0)
            if message is None:  # the last offset is a transaction's marker
                break
            assert message.error() is None
            found.append((message.key().decode(), decode(message.value())))
        consumer.close()
        return found

    def first_offsets(self) -> dict[int, int]:
        consumer = Consumer(consumer_config(self.config.kafka, "test"))
        ends = {
            partition: consumer.get_watermark_offsets(
                TopicPartition(self.topics.groups, partition), timeout=20
            )
            for partition in range(self.config.kafka.num_partitions)
        }
        consumer.close()
        return {partition: first for partition, (first, _) in ends.items()}

    def metrics(self) -> list[dict[str, Any]]:
        path = self.config.metrics_path
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def process(self, directory: Path, *, ranks: int = 1) -> "subprocess.Popen[bytes]":
        """A trainer, or a job of several; its log is `trainer.log` in `directory`."""
        path = directory / "config.yaml"
        path.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with (directory / "trainer.log").open("ab") as log:
            return subprocess.Popen(
                [*launcher, "-m", "tests.integration.trainer_runs", str(path)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )


def new_run(
    bootstrap_servers: str, run_id: str, model: Path, directory: Path, **changes: Any
) -> TrainerRun:
    """2 partitions, N = 2, G = 4, one step ahead; a checkpoint every third step, two kept."""
    directory.mkdir(exist_ok=True)
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"agent_ref": {"name": "sums"}}\n')
    values: dict[str, Any] = {
        "run": {"id": run_id, "directory": str(directory)},
        "kafka": {"bootstrap_servers": bootstrap_servers, "num_partitions": 2},
        "data": {"train_jsonl_fpath": str(prompts)},
        "grpo": {
            "num_prompts_per_step": N,
            "num_generations_per_prompt": G,
            "max_num_steps": 100,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        },
        "policy": {
            "model_name": str(model),
            "train_micro_batch_size": 4,
            "precision": "float32",
            "megatron_cfg": {"optimizer": {"lr": 1e-2, "min_lr": 0.0}},
        },
        "env": {"agents": {"sums": {"gym": "a:B"}, "products": {"gym": "a:B"}}},
        "checkpointing": {"save_period": 3, "keep_top_k": 2},
    }
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    config = Config.model_validate(values)
    return TrainerRun(config, init_run(config))


def random_trace(trace_id: str, *, seed: int) -> Trace:
    """8 to 20 tokens, sampled after the first PROMPT."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(8, 21))
    logprobs = np.zeros(length)
    logprobs[PROMPT:] = -rng.uniform(3.5, 4.9, length - PROMPT)
    span = SampledSpan(
        model_call_id=f"{trace_id}:call", start=PROMPT, end=length, version_start=0, version_end=0
    )
    return Trace(
        trace_id=trace_id,
        model_call_ids=[span.model_call_id],
        token_ids=token_bytes(rng.integers(0, VOCAB, length)),
        generation_logprobs=logprob_bytes(logprobs),
        sampled_spans=[span],
    )


def wait_for(
    what: str, reached: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None
) -> None:
    """Until `reached`; fails at the deadline, or when `process` ends first."""
    end = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S:.0f} s"
        assert process is None or process.poll() is None, f"the trainer ended before {what}"
        time.sleep(0.05)


def main(path: str) -> None:
    from trainer.loop import run  # noqa: PLC0415 slow import, of no use to the tests' process

    logging.basicConfig(level=logging.INFO)
    with Path(path).open() as file:
        run(Config.model_validate(yaml.safe_load(file)), stop=threading.Event())


if __name__ == "__main__":
    main(sys.argv[1])
