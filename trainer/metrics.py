"""One JSON line a step: which tasks it trained, from which rewards, with what result.

A step that is trained again after a restore appends its line again, with the same tasks.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson
from torch import Tensor

from schemas.records import AssembledGroup
from trainer.traces import TrainingBatch


@dataclass(frozen=True)
class Durations:
    """Seconds of one step: waiting for its groups, training, and publishing the weights."""

    wait_s: float
    train_s: float
    publish_s: float

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s + self.publish_s


def step_metrics(
    step: int,
    groups: Sequence[AssembledGroup],
    batch: TrainingBatch | None,
    trained: Mapping[str, float],
    durations: Durations,
    *,
    at_ms: int,
) -> dict[str, Any]:
    """The line of `step`. `batch` is None for a step without groups, a zero update."""
    rows = [row for group in groups for row in group.rows]
    by_agent: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if not row.masked:
            by_agent[row.agent].append(row.reward)
    tokens = sum(
        span.end - span.start
        for row in rows
        for trace in row.traces
        for span in trace.sampled_spans
    )
    return {
        "step": step,
        "tasks": sorted(group.task_index for group in groups),
        "reward_mean": _mean(reward for rewards in by_agent.values() for reward in rewards),
        "reward": {agent: fmean(rewards) for agent, rewards in sorted(by_agent.items())},
        "staleness": _mean(group.target_step - group.generation_version for group in groups),
        "groups": len(groups),
        "rows": len(rows),
        "masked_rows": sum(row.masked for row in rows),
        "truncated_rows": sum(row.truncated for row in rows),
        "turns_mean": _mean(row.turn_count for row in rows),
        "tokens": tokens,
        "eligible_tokens": batch.eligible_tokens if batch else 0,
        "tokens_per_s": tokens / durations.step_s if durations.step_s > 0 else 0.0,
        "wait_s": durations.wait_s,
        "train_s": durations.train_s,
        "publish_s": durations.publish_s,
        "step_s": durations.step_s,
        "at_ms": at_ms,
        "loss": 0.0,  # of a zero update
        "grad_norm": 0.0,
        "zero_update": 1.0,
        **trained,
        **(batch.metrics if batch else {}),
        **timing(groups),
    }


def logprob_error_max(batch: TrainingBatch, prev_logprobs: Tensor) -> float:
    """Largest |trainer's - generator's log-probability| of an eligible token; [rows, S] inputs."""
    eligible = batch.token_mask * batch.sample_mask.unsqueeze(1) > 0
    errors = (prev_logprobs - batch.generation_logprobs).abs()[eligible]
    return float(errors.max().item()) if errors.numel() else 0.0


def timing(groups: Iterable[AssembledGroup]) -> dict[str, float]:
    """Seconds by name, the slowest attempt's: for the step and, with several shards, for each."""
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    for group in groups:
        for row in group.rows:
            known = worst[row.shard]
            for name, seconds in (row.timing or {}).items():
                known[name] = max(seconds, known.get(name, seconds))
    rolled: dict[str, float] = {}
    for shard, known in sorted(worst.items()):
        for name, seconds in sorted(known.items()):
            rolled[f"timing/{name}"] = max(seconds, rolled.get(f"timing/{name}", seconds))
            if len(worst) > 1:
                rolled[f"timing/shard/{shard}/{name}"] = seconds
    return rolled


class MetricsFile:
    """Appends whole lines that survive a crash."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._cut_torn_line()

    def append(self, line: Mapping[str, Any]) -> None:
        payload = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        with self._path.open("ab", buffering=0) as file:
            file.write(payload)
            os.fsync(file.fileno())

    def _cut_torn_line(self) -> None:
        """A kill in the middle of a write leaves a line without its end; it was not counted."""
        if not self._path.exists():
            return
        whole = self._path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(self._path, end)


def _mean(values: Iterable[float]) -> float | None:
    """None where there is nothing to average."""
    known = np.fromiter(values, dtype=np.float64)
    return float(known.mean()) if known.size else None
