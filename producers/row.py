"""A prompt group as its gym sees it, and a gym's result as the row that goes on the wire.

Pure: the clock's reading comes in as an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from producers.gyms.protocol import RolloutRequest, RolloutResult, Timing
from schemas.errors import DatasetError
from schemas.identity import rollout_id
from schemas.records import (
    AttemptFailed,
    ExecutionStarted,
    FailedBy,
    PromptGroup,
    RolloutRow,
)

ROLLOUT_ID_KEY = "_ng_rollout_id"


@dataclass(frozen=True)
class RowOptions:
    """What the configuration says about rows."""

    mask_flagged: bool = True
    """Honour `mask_sample` of results (env.should_mask_flagged_samples)"""
    keep_full_result: bool = False
    """Rows carry the full result (logger.wandb.log_nemo_gym_full_result_tables)"""


def rollout_request(group: PromptGroup) -> RolloutRequest:
    """Raises DatasetError where the rows are not JSON objects, or not one or G of them."""
    where = f"task {group.task_index} attempt {group.attempt}"
    if len(group.rows) not in (1, group.group_size):
        raise DatasetError(
            f"{where}: {len(group.rows)} dataset rows for a group of {group.group_size}; a prompt "
            "has one row, or one for each rollout"
        )
    rows = [_row_object(payload, where) for payload in group.rows]
    if len(rows) < group.group_size:
        rows = [dict(rows[0]) for _ in range(group.group_size)]
    return RolloutRequest(
        task_index=group.task_index,
        attempt=group.attempt,
        agent=group.agent,
        rows=rows,
        rollout_ids=_rollout_ids(group, rows, where),
        deadline_s=group.deadline_s,
    )


def _row_object(payload: bytes, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{where}: a dataset row is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: a dataset row is {type(row).__name__}, not an object")
    return row


def _rollout_ids(group: PromptGroup, rows: list[dict[str, Any]], where: str) -> list[str]:
    # An id supplied with a row that is repeated would name several rollouts.
    own = len(group.rows) == group.group_size
    try:
        ids = [
            rollout_id(
                group.task_index, index, group.attempt, row.get(ROLLOUT_ID_KEY) if own else None
            )
            for index, row in enumerate(rows)
        ]
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{where}: {ROLLOUT_ID_KEY}: {error}") from error
    if len(set(ids)) != len(ids):
        raise DatasetError(f"{where}: {ROLLOUT_ID_KEY} is the same in two rows: {sorted(ids)}")
    return ids


def rollout_row(
    group: PromptGroup,
    started: ExecutionStarted,
    row_index: int,
    rollout: str,
    result: RolloutResult,
    *,
    timing: Timing | None,
    produced_at_ms: int,
    options: RowOptions,
) -> RolloutRow:
    """`rollout` is the rollout's id; `timing`, seconds by name, is given with the last row only."""
    return RolloutRow(
        **identity_of(group),
        row_index=row_index,
        execution_id=started.execution_id,
        traces=result.traces,
        rollout_id=rollout,
        rowidx=group.rowidx_start + row_index,
        agent=group.agent,
        shard=started.shard,
        replica=started.replica,
        reward=float(result.reward),
        reward_components={name: float(part) for name, part in result.reward_components.items()},
        masked=result.masked or (options.mask_flagged and is_flagged(result.full_result)),
        truncated=result.truncated,
        failure_class=result.failure_class,
        turn_count=result.turn_count,
        version_start=result.version_start,
        produced_at_ms=produced_at_ms,
        timing=dict(timing) if timing is not None else None,
        full_result=orjson.dumps(result.full_result) if options.keep_full_result else None,
    )


def is_flagged(full_result: Mapping[str, Any]) -> bool:
    """Whether a result asks not to be trained: `mask_sample`, or `instance_config.mask_sample`."""
    config = full_result.get("instance_config")
    nested = config.get("mask_sample") if isinstance(config, Mapping) else None
    return bool(full_result.get("mask_sample")) or bool(nested)


def attempt_failed(
    group: PromptGroup,
    *,
    execution_id: str | None,
    reason: str,
    failure_class: str,
    message: str,
) -> AttemptFailed:
    """What a shard says of an attempt that it will not complete."""
    return AttemptFailed(
        **identity_of(group),
        execution_id=execution_id,
        by=FailedBy.SHARD,
        reason=reason,
        failure_class=failure_class,
        message=message,
    )


def identity_of(group: PromptGroup) -> dict[str, Any]:
    """What every record about the attempt begins with, as the dispatcher stamped it."""
    return {
        "run_id": group.run_id,
        "task_index": group.task_index,
        "attempt": group.attempt,
        "group_size": group.group_size,
        "target_step": group.target_step,
        "stamp": group.stamp,
        "purpose": group.purpose,
    }
