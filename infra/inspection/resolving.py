"""Which letters a command resolves, and resolving them in batches, each one transaction."""

from collections.abc import Callable, Iterator
from contextlib import closing

from infra.inspection.errors import AlreadyResolved, NotThere
from infra.inspection.letters import Letter, Resolution, Selection
from infra.inspection.pictures import letter_at, letters_of
from infra.inspection.reading import RunReader
from infra.inspection.resolver import Replay, Resolver
from schemas.errors import RunStopped
from schemas.identity import partition_of

BATCH = 500
BATCH_BYTES = 32 << 20  # one letter may have more

Agreed = Callable[[list[Letter]], bool]


def resolve(
    reader: RunReader, selection: Selection, resolution: Resolution, agreed: Agreed
) -> Iterator[Letter]:
    """Yields the letters as they are resolved; none where `agreed` says no to them.

    Raises NotThere, AlreadyResolved, RunStopped for a replay into a run that has finished, and
    what Resolver raises: then the letters that were not yielded are still open.
    """
    if resolution is Resolution.REPLAYED and reader.control.finished is not None:
        raise RunStopped(
            f"run {reader.manifest.run_id} has finished: nothing would read the replayed records"
        )
    # First: another tool is fenced, so that its last mark is read below.
    with closing(Resolver(reader.config.kafka, reader.topics)) as resolver:
        chosen = chosen_letters(reader, selection)
        if not chosen or not agreed(chosen):
            return
        for partition in reader.partitions:
            here = [letter for letter in chosen if letter.place.partition == partition]
            if resolution is Resolution.DROPPED:
                for start in range(0, len(here), BATCH):
                    yield from resolver.drop(here[start : start + BATCH])
            else:
                for batch in _batches(reader, partition, here):
                    yield from resolver.replay(batch)


def chosen_letters(reader: RunReader, selection: Selection) -> list[Letter]:
    """Of every partition, by place. Raises NotThere, AlreadyResolved for a single one."""
    partitions = list(reader.partitions)
    if selection.place is not None:
        letter_at(reader, selection.place)
        partitions = [selection.place.partition]
    letters = [
        letter for partition in partitions for letter in letters_of(reader, partition, written=True)
    ]
    chosen = [letter for letter in letters if selection.takes(letter)]
    if selection.place is not None and not chosen:
        raise _why_none(letters, selection)
    return chosen


def _why_none(letters: list[Letter], selection: Selection) -> AlreadyResolved | NotThere:
    letter = next((each for each in letters if each.place == selection.place), None)
    if letter is None or letter.mark is None:
        return NotThere(f"the letter at {selection.place} was deleted in this moment")
    partition, offset = letter.place
    copy = letter.mark.replayed_to
    where = f" as offset {copy.offset} of partition {copy.partition} of rows" if copy else ""
    return AlreadyResolved(
        f"the letter at offset {offset} of partition {partition} is already "
        f"{letter.mark.resolution}{where}: with --again it is resolved once more"
    )


def _batches(reader: RunReader, partition: int, letters: list[Letter]) -> Iterator[list[Replay]]:
    """The letters with their bytes, which are read only now."""
    if not letters:
        return
    wanted = {letter.place: letter for letter in letters}
    batch: list[Replay] = []
    size_bytes = 0
    for stored in reader.read(reader.topics.dlq, partition, letters[0].place.offset):
        letter = wanted.pop(stored.place, None)
        if letter is None:
            continue
        batch.append(Replay(letter, stored.key, stored.value, _target(reader, letter)))
        size_bytes += letter.size_bytes
        if not wanted or len(batch) == BATCH or size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        if not wanted:
            return
    if batch:
        yield batch
    raise NotThere(
        f"{len(wanted)} letters of {reader.topics.dlq} partition {partition} are no longer there, "
        f"the first at offset {min(wanted).offset}: they were deleted in this moment"
    )


def _target(reader: RunReader, letter: Letter) -> int:
    """The task's partition; where no task is known, the one that the record came on."""
    if letter.task is not None:
        return partition_of(letter.task, reader.manifest.num_partitions)
    return letter.place.partition if letter.origin is None else letter.origin.partition
