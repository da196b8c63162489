"""Whether a cluster's settings can carry a run. Pure: the broker's settings in, sentences out."""

from collections.abc import Mapping
from typing import NamedTuple

from schemas.config import KafkaConfig

OFFSET_METADATA_BYTES = 4096  # the settled set travels in an offset commit's metadata
ABORT_CHECK = "transaction.abort.timed.out.transaction.cleanup.interval.ms"
LEAST_ABORT_CHECK_MS = 10_000
LEAST_RETENTION_MINUTES = 7 * 24 * 60  # shorter than Kafka's own default: somebody lowered it


class Floor(NamedTuple):
    """A broker setting, the least value that the run needs, and where that comes from."""

    setting: str
    least: int
    because: str


def floors_of(kafka: KafkaConfig) -> list[Floor]:
    """The least values that `kafka` asks of every broker."""
    limits = kafka.limits
    sizes = (
        f"kafka.max_row_bytes = {kafka.max_row_bytes} and "
        f"kafka.max_group_bytes = {kafka.max_group_bytes}"
    )
    return [
        Floor("message.max.bytes", limits.largest_message_bytes, sizes),
        Floor("replica.fetch.max.bytes", limits.largest_message_bytes, sizes),
        Floor("socket.request.max.bytes", limits.socket_request_bytes, sizes),
        Floor(
            "offset.metadata.max.bytes",
            OFFSET_METADATA_BYTES,
            "an assembler commits which tasks are settled with its offsets",
        ),
        Floor(
            "transaction.max.timeout.ms",
            kafka.transaction_timeout_ms,
            f"kafka.transaction_timeout_ms = {kafka.transaction_timeout_ms}",
        ),
        Floor(
            "group.max.session.timeout.ms",
            kafka.session_timeout_ms,
            f"kafka.session_timeout_ms = {kafka.session_timeout_ms}",
        ),
    ]


def shortfalls(settings: Mapping[str, str | None], kafka: KafkaConfig) -> list[str]:
    """One sentence for each setting that is too small, with both numbers and the way out.

    `settings` are the broker's, by Kafka's names; one that it does not report is not judged.
    """
    found = [
        f"the broker's {floor.setting} is {value}, the run needs {floor.least} "
        f"({floor.because}): set {floor.setting}={floor.least} on every broker, or lower the run's"
        for floor in floors_of(kafka)
        if (value := settings.get(floor.setting)) is not None and int(value) < floor.least
    ]
    shortest = settings.get("group.min.session.timeout.ms")
    if shortest is not None and int(shortest) > kafka.session_timeout_ms:
        found.append(
            f"the broker's group.min.session.timeout.ms is {shortest}, above "
            f"kafka.session_timeout_ms = {kafka.session_timeout_ms}: raise kafka.session_timeout_ms"
            f" to {shortest}, or lower the broker's"
        )
    return found


def warnings(settings: Mapping[str, str | None]) -> list[str]:
    """What a run can live with until something goes wrong, one sentence each."""
    found = (retention_warning(settings), abort_check_warning(settings))
    return [sentence for sentence in found if sentence is not None]


def abort_check_warning(settings: Mapping[str, str | None]) -> str | None:
    """A sentence where the broker ends transactions before it knows its partitions again.

    Seen with Kafka 4.4: killed and started with a check each second, 25 of 48 partitions kept a
    transaction open for ever, and a later commit showed what had been aborted; 0 of 32 with 10 s.
    """
    interval_ms = settings.get(ABORT_CHECK)
    if interval_ms is None or int(interval_ms) >= LEAST_ABORT_CHECK_MS:
        return None
    return (
        f"the broker's {ABORT_CHECK} is {interval_ms}, below Kafka's default of "
        f"{LEAST_ABORT_CHECK_MS}: a broker that is killed may leave transactions that never end, "
        "and groups of aborted ones can appear; leave it at the default"
    )


def retention_warning(settings: Mapping[str, str | None]) -> str | None:
    """A sentence where a resting run would soon lose its committed offsets."""
    minutes = settings.get("offsets.retention.minutes")
    if minutes is None or int(minutes) >= LEAST_RETENTION_MINUTES:
        return None
    return (
        f"the broker's offsets.retention.minutes is {minutes}: a run that rests longer than "
        f"{int(minutes) / 60:.1f} hours loses its committed offsets and cannot go on; raise it "
        f"to {LEAST_RETENTION_MINUTES} or more before you pause a run"
    )
