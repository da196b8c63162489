"""Small valid prompt groups for tests, stamped as the dispatcher would have done it."""

from collections.abc import Sequence
from typing import Any

import orjson

from schemas.records import Manifest, PromptGroup
from tests.rows import make_identity


def make_group(
    manifest: Manifest,
    task_index: int,
    attempt: int = 0,
    *,
    target_step: int = 0,
    group_size: int | None = None,
    rows: Sequence[dict[str, Any]] = ({"question": "1 + 1"},),
    **changes: Any,
) -> PromptGroup:
    """A prompt of one dataset row, unless `rows` says otherwise."""
    fields: dict[str, Any] = make_identity(
        manifest, task_index, attempt, target_step=target_step, group_size=group_size
    ) | {
        "seq": task_index,
        "min_version": 0,
        "alone": False,
        "agent": "sums",
        "shard": "gym",
        "replica": 0,
        "deadline_s": 10.0,
        "rowidx_start": 0,
        "rows": [orjson.dumps(row) for row in rows],
        "dispatched_at_ms": 1,
    }
    return PromptGroup(**fields | changes)
