"""What became of every task, from the topics and the recorded steps alone: the closed sums."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import Consumer, TopicPartition

from consumers.settlement import SettledSet
from infra.audit import Audit, audit_run
from infra.topic_reading import PartitionReader
from schemas.clients import consumer_config
from schemas.codec import decode_as
from schemas.config import Config
from schemas.identity import initial_watermark
from schemas.records import EventKind, GroupEvent
from schemas.topics import DLQ_REASON, Topics

ANSWER_S = 30.0


@dataclass(frozen=True)
class Findings:
    """`events`: how many of each kind; `dead_letters`: how many for each reason.

    `problems`: what must not be, one sentence each.
    """

    audit: Audit
    events: dict[str, int]
    dead_letters: dict[str, int]
    longest_recovery_s: float | None
    problems: list[str]


def examine(config: Config, kills_ms: Sequence[int]) -> Findings:
    """Of a run that has finished. `kills_ms`: the wall-clock times of all kills.

    Raises what audit_run() raises.
    """
    audit = audit_run(config)
    topics = Topics(config.run.id)
    with closing(PartitionReader(config.kafka, f"{config.run.id}.chaos.audit")) as reader:
        kinds, accepted_ms = _events(reader, topics, config.kafka.num_partitions)
        letters = _dead_letters(reader, topics, config.kafka.num_partitions)
    problems = [
        *audit.problems,
        *sum_flaws(audit),
        *(f"{count} records are in dlq: {reason}" for reason, count in letters.items()),
        *_unsettled(config, audit.dispatched),
    ]
    recovery_s = longest_recovery_s(kills_ms, accepted_ms)
    return Findings(audit, dict(kinds), dict(letters), recovery_s, problems)


def sum_flaws(audit: Audit) -> list[str]:
    """What does not close, of a run that has nothing left to do."""
    must_be_zero = {
        "outstanding": audit.outstanding,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "out of order": audit.out_of_order,
    }
    flaws = [f"{name} is {count}, not 0" for name, count in must_be_zero.items() if count]
    abandoned = sum(audit.abandoned.values())
    if audit.accepted + abandoned != audit.dispatched:
        flaws.append(
            f"{audit.accepted} accepted and {abandoned} abandoned tasks are not the "
            f"{audit.dispatched} that were dispatched"
        )
    if not audit.accepted:
        flaws.append("no group was accepted")
    return flaws


def longest_recovery_s(kills_ms: Sequence[int], accepted_ms: Sequence[int]) -> float | None:
    """From a kill to the next accepted group; kills that none follows do not count."""
    ordered = sorted(accepted_ms)
    nexts = [(kill, bisect_left(ordered, kill)) for kill in kills_ms]
    waits = [ordered[at] - kill for kill, at in nexts if at < len(ordered)]
    return max(waits) / 1000 if waits else None


def _events(
    reader: PartitionReader, topics: Topics, partitions: int
) -> tuple[Counter[str], list[int]]:
    """How many of each kind, and when groups were accepted."""
    kinds, accepted_ms = Counter[str](), list[int]()
    for partition in range(partitions):
        for message in reader.read(topics.events, partition):
            event = decode_as(message.value(), GroupEvent)
            kinds[event.kind.value] += 1
            if event.kind is EventKind.ACCEPTED:
                accepted_ms.append(event.at_ms)
    return kinds, accepted_ms


def _dead_letters(reader: PartitionReader, topics: Topics, partitions: int) -> Counter[str]:
    """By reason. Nobody sends a bad record here, so each is an attempt that ran twice, or worse."""
    return Counter(
        dict(message.headers())[DLQ_REASON].decode()
        for partition in range(partitions)
        for message in reader.read(topics.dlq, partition)
    )


def _unsettled(config: Config, dispatched: int) -> list[str]:
    """Partitions whose last commit does not say that all of their tasks are done.

    A run begins with task 0, so its `dispatched` tasks are 0 to dispatched - 1.
    """
    topics, partitions = Topics(config.run.id), config.kafka.num_partitions
    settings = consumer_config(config.kafka, f"{config.run.id}.chaos", topics.assembler_group)
    asked = [TopicPartition(topics.rows, number) for number in range(partitions)]
    with closing(Consumer(settings)) as consumer:
        found = consumer.committed(asked, timeout=ANSWER_S)
    flaws = []
    for place in found:
        settled, _ = SettledSet.decode(place.metadata or "")
        end = initial_watermark(place.partition, partitions, dispatched)
        if (settled.watermark, settled.end) != (end, end):
            flaws.append(
                f"rows partition {place.partition}: the commit has watermark {settled.watermark} "
                f"and settled ordinals up to {settled.end}, both must be {end}"
            )
    return flaws
