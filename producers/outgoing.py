"""Decisions and ledger changes as the records of the dispatcher's transaction."""

from producers.dataset import Dataset
from producers.decisions import (
    DeclareFatal,
    DeclareLastTarget,
    DeclareTargetSize,
    SendPrompt,
    Written,
)
from producers.ledger import LedgerRecord
from producers.prompts import Prompter
from producers.transactions import Outgoing
from schemas import topics as keys
from schemas.codec import encode
from schemas.errors import RecordTooLarge
from schemas.identity import key_of
from schemas.records import Fatal, LastTarget, LedgerTask, Record, TargetSize
from schemas.status import now_ms
from schemas.topics import Topics

ROLE = "dispatcher"


class Addressing:
    """Knows the topic, partition, key and bytes of everything that is written."""

    def __init__(
        self, topics: Topics, prompter: Prompter, dataset: Dataset, prompt_limit_bytes: int
    ) -> None:
        self._topics = topics
        self._prompter = prompter
        self._dataset = dataset
        self._prompt_limit = prompt_limit_bytes

    def of(self, decision: Written) -> Outgoing:
        """Raises RecordTooLarge, and DatasetError where the file changed."""
        match decision:
            case SendPrompt(task):
                return self._prompt(task)
            case DeclareLastTarget(target):
                return self.on_control(keys.CONTROL_LAST_TARGET, LastTarget(target_step=target))
            case DeclareTargetSize(target, groups):
                size = TargetSize(target_step=target, groups=groups)
                return self.on_control(f"{keys.CONTROL_TARGET}{target}", size)
            case DeclareFatal(message):
                fatal = Fatal(role=ROLE, message=message, at_ms=now_ms())
                return self.on_control(keys.CONTROL_FATAL, fatal)

    def _prompt(self, task: LedgerTask) -> Outgoing:
        rows = self._dataset.rows_of(task.epoch, task.position)
        value = encode(self._prompter.prompt(task, rows))
        if len(value) > self._prompt_limit:
            raise RecordTooLarge(
                f"the prompt of task {task.task_index} takes {len(value)} bytes, the topic takes "
                f"{self._prompt_limit}: start a run with a larger kafka.max_row_bytes"
            )
        return Outgoing(
            self._topics.prompts(task.shard), task.partition, key_of(task.task_index), value
        )

    def on_control(self, key: str, record: Record) -> Outgoing:
        return Outgoing(self._topics.control, 0, key.encode(), encode(record))

    def on_ledger(self, key: bytes, record: LedgerRecord | None) -> Outgoing:
        value = None if record is None else encode(record)
        return Outgoing(self._topics.dispatch, 0, key, value)
