"""Where partitions end, as their leaders say it now."""

from collections.abc import Iterable

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

Place = tuple[str, int]  # topic, partition


def ends(
    admin: AdminClient, places: Iterable[Place], isolation: IsolationLevel, timeout_s: float
) -> dict[Place, int]:
    """READ_COMMITTED: the last stable offset. READ_UNCOMMITTED: one past the last record written.

    Raises KafkaException, also for a negative offset: no answer in the place of one.
    """
    asked = {TopicPartition(*place): OffsetSpec.latest() for place in places}
    answers = admin.list_offsets(asked, isolation_level=isolation, request_timeout=timeout_s)
    found = {(p.topic, p.partition): int(f.result().offset) for p, f in answers.items()}
    if min(found.values(), default=0) < 0:
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
    return found
