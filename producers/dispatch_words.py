"""What the dispatcher does and waits for, in words."""

import logging

from producers.decisions import (
    DeclareFatal,
    DeclareLastTarget,
    DeclareTargetSize,
    SendPrompt,
    Written,
)
from producers.planning import Planner

logger = logging.getLogger(__name__)


def described(planner: Planner, first_step: int) -> str:
    """What the dispatcher waits for, for people."""
    tasks, totals = planner.ledger.tasks, planner.ledger.totals
    if planner.version is None:
        return f"waiting for the trainer to publish version {first_step}"
    if tasks:
        first = min(tasks.values(), key=lambda task: (task.target_step, task.task_index))
        return (
            f"waiting for {len(tasks)} groups; the first is task {first.task_index} (target "
            f"{first.target_step}, attempt {first.attempt}, {first.state} on "
            f"{first.shard}/{first.replica})"
        )
    if totals.last_target is not None:
        return f"all groups are there; waiting for the trainer to finish step {totals.last_target}"
    return f"all groups are there; waiting for version {planner.version + 1}"


def log_decision(decision: Written) -> None:
    match decision:
        case SendPrompt(task):
            logger.debug(
                "task %d attempt %d (target %d, %s) to %s/%d",
                task.task_index, task.attempt, task.target_step, task.agent, task.shard,
                task.replica,
            )  # fmt: skip
        case DeclareLastTarget(target):
            logger.info("the last target is %d", target)
        case DeclareTargetSize(target, groups):
            logger.info("target %d will have %d groups", target, groups)
        case DeclareFatal(message):
            logger.error("the run must stop: %s", message)
