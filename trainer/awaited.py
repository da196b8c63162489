"""For whom a step waits: the dispatcher's ledger, read only to put names on the missing groups.

`Ledger` and `awaited` are pure; `LedgerLog` is the consumer that feeds the ledger.
"""

import logging
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaError, TopicPartition

from schemas.clients import consumer_config
from schemas.codec import decode
from schemas.config import KafkaConfig
from schemas.errors import RecordUnreadable
from schemas.records import LedgerTask, Purpose, Record, TaskState
from schemas.topics import Topics

NAMED = 4  # more tasks than these are only counted
_log = logging.getLogger(__name__)


class Ledger:
    """The outstanding tasks by key, as the dispatcher wrote them last."""

    def __init__(self) -> None:
        self._tasks: dict[str, LedgerTask] = {}

    def apply(self, key: str, record: Record | None) -> None:
        """`record` is None for a tombstone: the task is settled."""
        if record is None:
            self._tasks.pop(key, None)
        elif isinstance(record, LedgerTask):
            self._tasks[key] = record

    def of_step(self, step: int) -> list[LedgerTask]:
        """Outstanding tasks that fill a slot of `step`, ascending."""
        tasks = [
            task
            for task in self._tasks.values()
            if task.target_step == step and task.purpose is Purpose.TRAIN
        ]
        return sorted(tasks, key=lambda task: task.task_index)


def awaited(
    step: int, arrived: Sequence[int], size: int, tasks: Sequence[LedgerTask], now_ms: int
) -> str:
    """One line: how much of the step is here, and each missing task with shard, attempt and age.

    "step 7: 3 of 8 groups; waiting for task 61 (shard sums/0, attempt 0, 12 s), 4 not dispatched"
    """
    here = set(arrived)
    missing = [task for task in tasks if task.task_index not in here]
    names = [_named(task, now_ms) for task in missing[:NAMED]]
    if len(missing) > NAMED:
        names.append(f"{len(missing) - NAMED} more")
    undispatched = size - len(here) - len(missing)
    if undispatched > 0:
        names.append(f"{undispatched} not dispatched")
    known = f"; waiting for {', '.join(names)}" if names else ""
    return f"step {step}: {len(here)} of {size} groups{known}"


def _named(task: LedgerTask, now_ms: int) -> str:
    age_s = max(0, now_ms - task.dispatched_at_ms) // 1000
    state = "" if task.state is TaskState.DISPATCHED else f", {task.state}: {task.reason}"
    return (
        f"task {task.task_index} (shard {task.shard}/{task.replica}, attempt {task.attempt}, "
        f"{age_s} s{state})"
    )


class LedgerLog:
    """Follows `dispatch` from its beginning. One thread."""

    def __init__(self, kafka: KafkaConfig, topics: Topics) -> None:
        self.ledger = Ledger()
        self._topic = topics.dispatch
        settings = consumer_config(kafka, f"{topics.run_id}.trainer.ledger")
        # only names are read here: what compaction removed is no loss
        self._consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])

    def poll(self) -> None:
        """Applies what has arrived, without waiting."""
        while (message := self._consumer.poll(0)) is not None:
            error = message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    _log.warning("%s: %s", self._topic, error.str())
                return
            key, value = message.key(), message.value()
            try:
                self.ledger.apply(key.decode(), None if value is None else decode(value))
            except RecordUnreadable as unreadable:
                # it would only have named whom we wait for
                _log.warning("%s offset %d: %s", self._topic, message.offset(), unreadable)

    def close(self) -> None:
        self._consumer.close()
