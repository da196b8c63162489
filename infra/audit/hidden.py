"""Whether a transaction that never ends hides records of a run, or could show them again later."""

import time
from collections.abc import Callable

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from infra.broker_limits import LEAST_ABORT_CHECK_MS
from infra.init import connected_admin
from schemas.config import Config
from schemas.offsets import Place, ends
from schemas.topics import Topics

ANSWER_S = 30.0
LOOK_S = 0.5


def hidden_flaws(config: Config, note: Callable[[str], None]) -> list[str]:
    """One sentence for each partition; a transaction that the broker is about to end is awaited."""
    admin = connected_admin(config)
    shards = {name: shard.replicas for name, shard in config.all_shards.items()}
    specs = Topics(config.run.id).specs(config.kafka.num_partitions, shards, config.kafka.limits)
    places = [(spec.name, number) for spec in specs for number in range(spec.partitions)]
    end_s = (
        time.monotonic()
        + config.kafka.transaction_timeout_ms / 1000
        + 3 * LEAST_ABORT_CHECK_MS / 1000
    )
    while hidden := _hidden(admin, places):
        if time.monotonic() > end_s:
            return [
                f"{topic} partition {partition}: a transaction that does not end hides the "
                f"records from offset {stable} to {written}; see kafka-transactions.sh "
                "find-hanging"
                for (topic, partition), (stable, written) in sorted(hidden.items())
            ]
        note(f"waiting for the end of open transactions in {len(hidden)} partitions")
        time.sleep(LOOK_S)
    return []


def _hidden(admin: AdminClient, places: list[Place]) -> dict[Place, tuple[int, int]]:
    """Last stable offset and written end, where they differ."""
    written = ends(admin, places, IsolationLevel.READ_UNCOMMITTED, ANSWER_S)
    # Asked last: others may write meanwhile.
    stable = ends(admin, places, IsolationLevel.READ_COMMITTED, ANSWER_S)
    return {
        place: (stable[place], written[place]) for place in places if stable[place] < written[place]
    }
