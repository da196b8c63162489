"""Reads what each picture is made of, in the order that the folds ask for."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from infra.audit.group_check import was_dispatched
from infra.inspection.errors import NotThere
from infra.inspection.history import History, Told, history_of
from infra.inspection.letters import Letter, LetterBook, is_mark
from infra.inspection.reading import RunReader
from infra.inspection.stored import Naming, Place, Stored, decoded
from infra.inspection.tasks import TaskBook, TaskLine
from schemas.codec import decode_as
from schemas.identity import key_of, partition_of
from schemas.records import AssembledGroup, GroupEvent, Manifest, RolloutRow


class FoundGroup(NamedTuple):
    place: Place
    size_bytes: int
    group: AssembledGroup


def letters_of(reader: RunReader, partition: int, *, written: bool = False) -> list[Letter]:
    """Of one partition of `dlq`, with their marks; `written`: with those that are on their way."""
    read = reader.read_written if written else reader.read
    book = LetterBook()
    for stored in read(reader.topics.dlq, partition):
        book.enter(stored)
    return book.letters()


def letter_at(reader: RunReader, place: Place) -> Stored:
    """The record of a letter. Raises NotThere."""
    topic = reader.topics.dlq
    if place.partition not in reader.partitions:
        raise NotThere(
            f"{topic} has the partitions 0 to {reader.manifest.num_partitions - 1}, and no "
            f"{place.partition}"
        )
    span = reader.span(topic, place.partition)
    found = next(reader.read(topic, place.partition, place.offset), None)
    if found is None or found.place != place:
        raise NotThere(
            f"{topic} partition {place.partition} has no record at offset {place.offset}; what it "
            f"has lies in {span.first} to {span.end - 1}: `groupstream dlq list --all` names each"
        )
    if is_mark(found.headers.items()):
        raise NotThere(
            f"the record at offset {place.offset} of {topic} partition {place.partition} is no "
            "letter: it marks one as resolved"
        )
    return found


def tasks_of(reader: RunReader, partitions: Iterable[int]) -> TaskBook:
    """Where the tasks of these partitions stand.

    The commit is read before the events: whatever it has let go is settled by an event after it.
    """
    book = _ledger_of(reader)
    for partition in partitions:
        first_row = reader.commit(partition).offset
        for event in _events(reader, partition):
            book.enter_event(event)
        if reader.span(reader.topics.events, partition).first > 0:
            for found in _groups(reader, partition):
                book.enter_group(found.group)
        for stored in reader.read(reader.topics.rows, partition, first_row):
            _enter_row(book, stored, reader.manifest)
    return book


def group_of(reader: RunReader, task_index: int) -> tuple[TaskLine, FoundGroup | None]:
    """The task, and its group where `groups` still has it. Raises NotThere."""
    partition = _home(reader, task_index)
    book = tasks_of(reader, [partition])
    key = key_of(task_index)
    found = next(_groups(reader, partition, key), None)
    if found is not None:
        book.enter_group(found.group)
    return require_task(book, task_index, reader), found


def history_in(reader: RunReader, task_index: int) -> History:
    """Everything that the topics tell of one task. Raises NotThere.

    The commit is read first: whatever it covers was written before it, and is read after it.
    """
    home = _home(reader, task_index)
    topics, naming = reader.topics, Naming(reader.manifest.run_id, task_index)
    seen = reader.commit(home).seen
    book, events = _ledger_of(reader), []
    from_offset, is_cut = 0, reader.span(topics.events, home).first > 0
    for stored in reader.read_written(topics.events, home):
        event = decode_as(stored.value or b"", GroupEvent)
        if is_cut and event.rows_offset >= 0:
            from_offset, is_cut = event.rows_offset, False
        if event.task_index == task_index:
            events.append(event)
            book.enter_event(event)
    if is_cut:
        from_offset = seen  # no event is left that names a record
    letters = [
        letter for partition in reader.partitions for letter in _about(reader, partition, naming)
    ]
    records = [s for s in reader.read(topics.rows, home) if naming.matches(s)]
    for stored in records:
        _enter_row(book, stored, reader.manifest)
    if not (events or letters or records):
        require_task(book, task_index, reader)
    return history_of(
        book.line(task_index), records, events, letters, Told(home, seen, from_offset)
    )


def require_task(book: TaskBook, task_index: int, reader: RunReader) -> TaskLine:
    """Raises NotThere for a task that was not dispatched and that no record names."""
    if not book.knows(task_index):
        first, end = reader.manifest.first_task_index, book.next_task_index
        there = f"its tasks are {first} to {end - 1}" if end > first else "it has no task yet"
        raise NotThere(
            f"run {reader.manifest.run_id} has not dispatched a task {task_index}: {there}"
        )
    return book.line(task_index)


def _home(reader: RunReader, task_index: int) -> int:
    return partition_of(task_index, reader.manifest.num_partitions)


def _ledger_of(reader: RunReader) -> TaskBook:
    manifest, checkpoint = reader.manifest, reader.control.checkpoint
    book = TaskBook(
        manifest.first_task_index,
        manifest.num_generations_per_prompt,
        0 if checkpoint is None else checkpoint.step,
    )
    for stored in reader.read(reader.topics.dispatch, 0):
        book.enter_ledger(stored)
    return book


def _events(reader: RunReader, partition: int) -> Iterator[GroupEvent]:
    for stored in reader.read(reader.topics.events, partition):
        yield decode_as(stored.value or b"", GroupEvent)


def _groups(reader: RunReader, partition: int, key: bytes | None = None) -> Iterator[FoundGroup]:
    for stored in reader.read(reader.topics.groups, partition):
        if key is None or stored.key == key:
            group = decode_as(stored.value or b"", AssembledGroup)
            yield FoundGroup(stored.place, stored.size_bytes, group)


def _about(reader: RunReader, partition: int, naming: Naming) -> list[Letter]:
    book = LetterBook()
    for stored in reader.read_written(reader.topics.dlq, partition):
        if is_mark(stored.headers.items()) or naming.matches(stored):
            book.enter(stored)
    return book.letters()


def _enter_row(book: TaskBook, stored: Stored, manifest: Manifest) -> None:
    """Not those that the assembler turns away: they would make tasks that are none."""
    record = decoded(stored.value)
    if isinstance(record, RolloutRow) and was_dispatched(record, manifest):
        home = partition_of(record.task_index, manifest.num_partitions)
        if stored.place.partition == home:
            book.enter_row(record, stored.at_ms)
