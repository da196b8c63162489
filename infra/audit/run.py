"""Reads a whole run, read committed, and audits it. One partition is in memory at a time."""

from collections.abc import Callable
from contextlib import closing

import orjson

from infra.audit.books import Audit, Books
from infra.audit.group_check import RowKey, flaws_of, is_ordered, was_dispatched
from infra.audit.hidden import hidden_flaws
from infra.init import control_state
from infra.topic_reading import PartitionReader
from schemas.codec import decode, decode_as
from schemas.config import Config
from schemas.errors import RecordUnreadable
from schemas.manifest import require_manifest
from schemas.records import (
    AssembledGroup,
    GroupEvent,
    LedgerTask,
    LedgerTotals,
    Manifest,
    RolloutRow,
)
from schemas.topics import Topics


def audit_run(config: Config, note: Callable[[str], None] = lambda _: None) -> Audit:
    """Of a run that has finished or is stopped. `note` gets a line for each partition.

    Raises ManifestMismatch without such a run, DeadlineExceeded, RecordUnreadable.
    """
    state = control_state(config)
    topics = Topics(config.run.id)
    books = Books(require_manifest(state, config))
    with closing(PartitionReader(config.kafka, f"{config.run.id}.audit")) as reader:
        for partition in range(config.kafka.num_partitions):
            note(f"auditing partition {partition + 1} of {config.kafka.num_partitions}")
            _enter_groups(books, reader, topics, partition)
            _enter_events(books, reader, topics, partition)
        _enter_ledger(books, reader, topics)
    books.flaws += hidden_flaws(config, note)
    return books.close(trained_of(config), finished=state.finished is not None)


def trained_of(config: Config) -> list[tuple[int, list[int]]]:
    """Step and tasks of each line of the trainer's metrics file, in the order of writing."""
    if not config.metrics_path.exists():
        return []
    with config.metrics_path.open("rb") as file:
        lines = [orjson.loads(line) for line in file if line.endswith(b"\n")]
    return [(line["step"], line["tasks"]) for line in lines]


def _enter_groups(books: Books, reader: PartitionReader, topics: Topics, partition: int) -> None:
    rows = _rows(reader, topics, partition, books.manifest)
    books.rows += len(rows)
    books.deleted_groups |= reader.span(topics.groups, partition).first > 0
    for message in reader.read(topics.groups, partition):
        payload = message.value()
        group = decode_as(payload, AssembledGroup)
        books.enter_group(group.task_index, group.target_step, group.purpose)
        books.out_of_order += not is_ordered(group)
        books.flaws += flaws_of(group, payload, rows, partition, books.manifest)


def _rows(
    reader: PartitionReader, topics: Topics, partition: int, manifest: Manifest
) -> dict[RowKey, bytes]:
    """The first payload of each row that was dispatched: one that differs fails its attempt.

    What no reader understands, or nobody dispatched, is in `dlq`.
    """
    rows: dict[RowKey, bytes] = {}
    for message in reader.read(topics.rows, partition):
        try:
            record = decode(message.value() or b"")
        except RecordUnreadable:
            continue
        if isinstance(record, RolloutRow) and was_dispatched(record, manifest):
            rows.setdefault((*record.cohort, record.row_index), message.value())
    return rows


def _enter_events(books: Books, reader: PartitionReader, topics: Topics, partition: int) -> None:
    books.deleted_events |= reader.span(topics.events, partition).first > 0
    for message in reader.read(topics.events, partition):
        books.enter_event(decode_as(message.value(), GroupEvent))


def _enter_ledger(books: Books, reader: PartitionReader, topics: Topics) -> None:
    for message in reader.read(topics.dispatch, 0):
        if message.value() is None:
            books.outstanding.discard(int(message.key()))
            continue
        match decode(message.value()):
            case LedgerTotals() as totals:
                books.totals = totals
            case LedgerTask(task_index=task_index):
                books.outstanding.add(task_index)
