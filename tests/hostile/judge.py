"""Whether every record that was sent has exactly one fate, and a right one."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from infra.topic_reading import PartitionReader
from schemas.codec import decode, decode_as, row_payloads
from schemas.config import Config
from schemas.errors import RecordUnreadable, RowRejected
from schemas.identity import partition_of, stamp
from schemas.records import (
    AssembledGroup,
    EventKind,
    GroupEvent,
    Manifest,
    OfAttempt,
    RolloutRow,
)
from schemas.topics import DLQ_OFFSET, DLQ_REASON, Topics
from schemas.validation import check_row
from tests.hostile.records import Attack

SHOWN = 10


@dataclass
class Verdict:
    """`fates`: how many records ended how; `reasons`: of the dead letters."""

    fates: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def judge(config: Config, manifest: Manifest, attack: Attack, reader: PartitionReader) -> Verdict:
    topics, verdict = Topics(config.run.id), Verdict()
    groups: Counter[int] = Counter()
    for partition in range(manifest.num_partitions):
        letters = _letters(reader, topics, partition, verdict)
        told = _told(reader, topics, partition)
        for message in reader.read(topics.rows, partition):
            offset, value = message.offset(), message.value()
            letter = letters.pop(offset, None)
            if letter is not None:
                verdict.fates["dead letter"] += 1
                if letter != _digest(value):
                    verdict.problems.append(f"{partition}/{offset}: its letter is not verbatim")
            elif offset in told:
                verdict.fates[told[offset]] += 1
            elif _is_right(value, partition, manifest):
                verdict.fates["placed"] += 1
            else:
                verdict.problems.append(f"{partition}/{offset}: neither in dlq nor a valid record")
        if letters:
            verdict.problems.append(f"{partition}: letters without a record: {list(letters)[:3]}")
        for message in reader.read(topics.groups, partition):
            group = decode_as(message.value(), AssembledGroup)
            groups[group.task_index] += 1
            if group.task_index in attack.good_tasks:
                _check_good(group, attack, verdict)
    lost = [task for task in attack.good_tasks if groups[task] == 0]
    doubled = [task for task, count in groups.items() if count > 1]
    verdict.problems += [f"good tasks are lost: {lost[:SHOWN]}"] if lost else []
    verdict.problems += [f"tasks came twice: {doubled[:SHOWN]}"] if doubled else []
    verdict.fates["good groups"] = sum(1 for task in groups if task in attack.good_tasks)
    return verdict


def _letters(
    reader: PartitionReader, topics: Topics, partition: int, verdict: Verdict
) -> dict[int, bytes]:
    """Digest of each dead letter's value by the offset that it came from."""
    letters: dict[int, bytes] = {}
    for message in reader.read(topics.dlq, partition):
        headers = dict(message.headers())
        offset = int(headers[DLQ_OFFSET])
        verdict.reasons[headers[DLQ_REASON].decode()] += 1
        if offset in letters:
            verdict.problems.append(f"{partition}/{offset} is in dlq twice")
        letters[offset] = _digest(message.value())
    return letters


def _told(reader: PartitionReader, topics: Topics, partition: int) -> dict[int, str]:
    """What events say of single records, by offset."""
    told = {}
    for message in reader.read(topics.events, partition):
        event = decode_as(message.value(), GroupEvent)
        if event.rows_offset >= 0 and event.kind is not EventKind.ACCEPTED:
            told[event.rows_offset] = event.kind.value
    return told


def _is_right(value: bytes | None, partition: int, manifest: Manifest) -> bool:
    """A record that the run's own producers could have sent there."""
    try:
        record = decode(value or b"")
        if isinstance(record, RolloutRow):
            check_row(record)
    except (RecordUnreadable, RowRejected):
        return False
    return (
        isinstance(record, OfAttempt)
        and partition_of(record.task_index, manifest.num_partitions) == partition
        and record.stamp
        == stamp(
            manifest.stamp_key,
            manifest.run_id,
            task_index=record.task_index,
            attempt=record.attempt,
            target_step=record.target_step,
            group_size=record.group_size,
        )
    )


def _check_good(group: AssembledGroup, attack: Attack, verdict: Verdict) -> None:
    if row_payloads(group) != attack.rows_of(group.task_index):
        verdict.problems.append(f"the group of task {group.task_index} is not what was sent")


def _digest(value: bytes | None) -> bytes:
    return b"" if value is None else hashlib.blake2b(value, digest_size=8).digest()
