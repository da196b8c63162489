"""What became of every task, from the topics and the recorded steps alone: the closed sums."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from consumers.settlement import SettledSet
from infra.audit import Audit, audit_run
from infra.inspection.letters import is_mark, letter_of
from infra.inspection.reading import stored_of
from infra.topic_reading import PartitionReader
from schemas.clients import consumer_config
from schemas.codec import decode_as
from schemas.config import Config
from schemas.identity import initial_watermark
from schemas.records import GroupEvent
from schemas.topics import Topics
from tests.chaos.deeds import Deed
from tests.chaos.gym import Script
from tests.chaos.story import Story, longest_recovery_s, recoveries_s

ANSWER_S = 30.0


@dataclass(frozen=True)
class Findings:
    """`sums`: the figures by name; `problems`: what must not be, one sentence each."""

    sums: dict[str, Any]
    problems: list[str]


def examine(
    config: Config, deeds: Sequence[Deed], script: Callable[[int, int], Script]
) -> Findings:
    """Of a run that has finished. `script`: what the gym does with a task's attempt.

    Raises what audit_run() raises.
    """
    audit = audit_run(config)
    story = _story(config)
    problems = [
        *audit.problems,
        *sum_flaws(audit),
        *story.flaws(script, deeds),
        *_unsettled(config, audit.dispatched),
    ]
    return Findings(sums_of(audit, story, deeds), problems)


def sums_of(audit: Audit, story: Story, deeds: Sequence[Deed]) -> dict[str, Any]:
    begins_ms = [deed.at_ms for deed in deeds]
    return {
        "dispatched": audit.dispatched,
        "accepted": audit.accepted,
        "abandoned": audit.abandoned,
        "outstanding": audit.outstanding,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "out_of_order": audit.out_of_order,
        "duplicates_dropped": story.kinds["duplicate"],
        "late_rows": story.kinds["late"],
        "attempts_failed": dict(story.failed),
        "dead_letters": dict(story.letters),
        "rows": audit.rows,
        "groups": audit.groups,
        "trained_steps": audit.trained_steps,
        "longest_recovery_s": longest_recovery_s(begins_ms, story.accepted_ms),
        "recovery_s": recoveries_s(deeds, story.accepted_ms),
    }


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
    if audit.groups != audit.accepted:
        flaws.append(f"{audit.accepted} tasks were accepted, `groups` has {audit.groups} groups")
    if not audit.accepted:
        flaws.append("no group was accepted")
    return flaws


def _story(config: Config) -> Story:
    story, topics = Story(), Topics(config.run.id)
    with closing(PartitionReader(config.kafka, f"{config.run.id}.chaos.audit")) as reader:
        for partition in range(config.kafka.num_partitions):
            for message in reader.read(topics.events, partition):
                _, at_ms = message.timestamp()
                story.enter_event(decode_as(message.value(), GroupEvent), at_ms)
            for message in reader.read(topics.dlq, partition):
                if not is_mark(message.headers()):
                    story.enter_letter(letter_of(stored_of(message)))
    return story


def _unsettled(config: Config, dispatched: int) -> list[str]:
    """Partitions whose last commit does not say that all of their tasks are done.

    A run begins with task 0, so its `dispatched` tasks are 0 to dispatched - 1.
    """
    topics, partitions = Topics(config.run.id), config.kafka.num_partitions
    settings = consumer_config(config.kafka, f"{config.run.id}.chaos", topics.assembler_group)
    asked = [TopicPartition(topics.rows, number) for number in range(partitions)]
    with closing(Consumer(settings)) as consumer:
        found = consumer.committed(asked, timeout=ANSWER_S)
        ends = [consumer.get_watermark_offsets(place, timeout=ANSWER_S)[1] for place in asked]
    flaws = []
    for place, rows_end in zip(found, ends, strict=True):
        settled, _ = SettledSet.decode(place.metadata or "")
        end = initial_watermark(place.partition, partitions, dispatched)
        if (settled.watermark, settled.end) != (end, end):
            flaws.append(
                f"rows partition {place.partition}: the commit has watermark {settled.watermark} "
                f"and settled ordinals up to {settled.end}, both must be {end}"
            )
        if place.offset != rows_end:
            flaws.append(
                f"rows partition {place.partition}: the commit is at {place.offset}, and the "
                f"topic ends at {rows_end}"
            )
    return flaws
