"""The records that the dispatcher writes about an attempt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from producers.decisions import Request, RequestCancel, RequestFailure
from schemas.identity import stamp
from schemas.records import (
    AttemptFailed,
    CancelRequested,
    FailedBy,
    LedgerTask,
    Manifest,
    PromptGroup,
)

ATTEMPT_INDEX = "_ng_attempt_index"


@dataclass(frozen=True)
class Prompter:
    """Stamps what belongs to one run. `deadline_s`: what a whole attempt may take."""

    manifest: Manifest
    deadline_s: float

    def prompt(self, task: LedgerTask, rows: Sequence[dict[str, Any]]) -> PromptGroup:
        """The group of the task's current attempt; `rows` are its dataset rows, one or G."""
        return PromptGroup(
            **self._identity(task),
            seq=task.seq,
            min_version=task.min_version,
            alone=task.alone,
            agent=task.agent,
            shard=task.shard,
            replica=task.replica,
            deadline_s=self.deadline_s,
            rowidx_start=task.rowidx_start,
            rows=[orjson.dumps(row) for row in _marked(task, rows)],
            dispatched_at_ms=task.dispatched_at_ms,
        )

    def request(self, request: Request) -> CancelRequested | AttemptFailed:
        match request:
            case RequestCancel(task):
                return CancelRequested(**self._identity(task), reason=task.reason)
            case RequestFailure(task, reason, message):
                return AttemptFailed(
                    **self._identity(task),
                    by=FailedBy.DISPATCHER,
                    reason=reason,
                    failure_class="infra",
                    message=message,
                )

    def _identity(self, task: LedgerTask) -> dict[str, Any]:
        manifest = self.manifest
        size = manifest.num_generations_per_prompt
        return {
            "run_id": manifest.run_id,
            "task_index": task.task_index,
            "attempt": task.attempt,
            "group_size": size,
            "target_step": task.target_step,
            "stamp": stamp(
                manifest.stamp_key,
                manifest.run_id,
                task_index=task.task_index,
                attempt=task.attempt,
                target_step=task.target_step,
                group_size=size,
            ),
            "purpose": task.purpose,
        }


def _marked(task: LedgerTask, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the task's identity, as gyms know it; supplied indexes are replaced.

    A single row is repeated by its shard, so what differs between rollouts is the shard's to add.
    """
    common: dict[str, Any] = {"_ng_task_index": task.task_index}
    rows = [{key: value for key, value in row.items() if key != ATTEMPT_INDEX} for row in rows]
    if task.attempt > 0:
        common[ATTEMPT_INDEX] = task.attempt
    if len(rows) == 1:
        return [rows[0] | common]
    return [
        row | common | {"_ng_rollout_index": index, "_rowidx": task.rowidx_start + index}
        for index, row in enumerate(rows)
    ]
