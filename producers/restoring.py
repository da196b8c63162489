"""What the dispatcher reads at its start and after an aborted transaction."""

from producers.ledger import Ledger, LedgerRecord
from producers.tail import Tail
from schemas.codec import decode
from schemas.errors import ManifestMismatch, OffsetsLost
from schemas.records import LedgerTask, LedgerTotals, Manifest
from schemas.topics import PARTITIONS_PER_REPLICA, Topics

READ_S = 120.0  # to read a topic to its end


def read_ledger(dispatch: Tail, manifest: Manifest) -> Ledger:
    """The ledger of the last commit. Raises LedgerBroken, DeadlineExceeded."""
    dispatch.start({0: 0})
    found: list[tuple[bytes, LedgerRecord | None]] = []
    for message in dispatch.read_to_end(READ_S):
        value = message.value()
        record = None if value is None else decode(value)
        if isinstance(record, LedgerTask | LedgerTotals | None):
            found.append((message.key(), record))
    return Ledger.folded(found, manifest.first_task_index, manifest.num_generations_per_prompt)


def committed_offsets(events: Tail, ledger: Ledger, manifest: Manifest) -> dict[int, int]:
    """Where each partition of `events` goes on.

    Raises OffsetsLost where the ledger has a commit and the group has none.
    """
    committed = events.committed(range(manifest.num_partitions), READ_S)
    lost = [partition for partition, offset in committed.items() if offset is None]
    if lost and not ledger.is_new:
        raise OffsetsLost(
            f"the dispatcher's group has no committed offset for partitions {lost} of "
            f"{events.topic}, yet the ledger has {len(ledger.tasks)} outstanding tasks "
            f"({sorted(ledger.tasks)[:20]}): did the run idle longer than the broker's "
            "offsets.retention.minutes? Start a new run from the last checkpoint"
        )
    return {partition: offset or 0 for partition, offset in committed.items()}


def require_partitions(tail: Tail, topics: Topics, manifest: Manifest) -> None:
    """Raises ManifestMismatch where a topic is not as the run was created."""
    expected = {
        topics.prompts(shard): replicas * PARTITIONS_PER_REPLICA
        for shard, replicas in manifest.shards.items()
    }
    for topic in (topics.events, topics.rows):
        expected[topic] = manifest.num_partitions
    for topic, wanted in expected.items():
        found = tail.partitions(topic, READ_S)
        if found != wanted:
            raise ManifestMismatch(
                f"topic {topic} has {found} partitions, the run was created with {wanted}: "
                "tasks would go elsewhere; start a new run under another run.id"
            )
