"""A run of its own for each measurement: topics, manifest, policy, and rows already encoded."""

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from confluent_kafka import Producer

from infra.init import init_run
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.config_file import parse_config
from schemas.identity import key_of, partition_of, stamp
from schemas.records import Manifest, PolicyVersion, RolloutRow, SampledSpan, Trace
from schemas.topics import CONTROL_POLICY, Topics
from schemas.vectors import logprob_bytes, token_bytes

GROUP_SIZE = 8
PROMPT_TOKENS = 64


def new_run(bootstrap_servers: str, directory: Path) -> tuple[Config, Manifest]:
    """A fresh run whose replay buffer takes every group at once."""
    dataset = directory / "prompts.jsonl"
    dataset.write_text("{}\n")
    config = parse_config(
        {
            "run": {"id": f"bench-{secrets.token_hex(4)}", "directory": str(directory)},
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "data": {"train_jsonl_fpath": str(dataset)},
            "grpo": {"num_generations_per_prompt": GROUP_SIZE},
            "policy": {"model_name": "none"},
            "env": {"agents": {"bench": {"gym": "tests.bench:none"}}},
        },
        "bench",
    )
    manifest = init_run(config)
    producer = Producer(producer_config(config.kafka, "bench"))
    policy = PolicyVersion(version=0, weights_dir="none", published_at_ms=0)
    producer.produce(
        Topics(config.run.id).control, encode(policy), CONTROL_POLICY.encode(), partition=0
    )
    producer.flush(30)
    return config, manifest


def rows_of(manifest: Manifest, task_index: int, tokens: int) -> Iterator[bytes]:
    """The encoded rows of one task, `tokens` long each."""
    seal = stamp(
        manifest.stamp_key,
        manifest.run_id,
        task_index=task_index,
        attempt=0,
        target_step=0,
        group_size=GROUP_SIZE,
    )
    logprobs = np.full(tokens, -0.5, dtype=np.float32)
    logprobs[:PROMPT_TOKENS] = 0
    ids, values = token_bytes(np.arange(tokens) % 32_000), logprob_bytes(logprobs)
    for row_index in range(GROUP_SIZE):
        name = f"{task_index}-{row_index}"
        span = SampledSpan(
            model_call_id=name, start=PROMPT_TOKENS, end=tokens, version_start=0, version_end=0
        )
        trace = Trace(
            trace_id=name,
            model_call_ids=[name],
            token_ids=ids,
            generation_logprobs=values,
            sampled_spans=[span],
        )
        yield encode(
            RolloutRow(
                run_id=manifest.run_id,
                task_index=task_index,
                attempt=0,
                group_size=GROUP_SIZE,
                target_step=0,
                stamp=seal,
                row_index=row_index,
                execution_id=f"{task_index}",
                traces=[trace],
                rollout_id=name,
                rowidx=row_index,
                agent="bench",
                shard="gym",
                replica=0,
                reward=float(row_index % 2),
                version_start=0,
                produced_at_ms=0,
            )
        )


def send_rows(config: Config, manifest: Manifest, groups: int, tokens: int) -> None:
    """`groups` tasks, rows of neighbours interleaved, as two busy shards would send them."""
    producer = Producer(producer_config(config.kafka, "bench"))
    topic = Topics(config.run.id).rows
    for first in range(0, groups, 2):
        streams = [rows_of(manifest, t, tokens) for t in range(first, min(first + 2, groups))]
        for batch in zip(*streams, strict=True):
            for task_index, payload in enumerate(batch, first):
                partition = partition_of(task_index, manifest.num_partitions)
                while True:
                    try:
                        producer.produce(topic, payload, key_of(task_index), partition=partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
        producer.poll(0)
    producer.flush(120)


def own_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="groupstream-bench-"))
