"""Settings of every Kafka client, by librdkafka's names, derived from `kafka.*`.

What the exactly-once rules rest on is fixed here and can't be configured away: every consumer
reads committed, commits nothing by itself, and every producer is idempotent.
"""

from typing import Any

from schemas.config import KafkaConfig
from schemas.errors import ConfigError
from schemas.limits import MIB

FIXED_CONSUMER: dict[str, Any] = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
}
FIXED_PRODUCER: dict[str, Any] = {"enable.idempotence": True, "acks": "all"}


def bootstrap_servers(kafka: KafkaConfig) -> str:
    if kafka.bootstrap_servers is None:
        raise ConfigError(
            "kafka.bootstrap_servers is not set: give it, or use `groupstream up`, which starts a "
            "broker of its own"
        )
    return kafka.bootstrap_servers


def common_config(kafka: KafkaConfig, client_id: str) -> dict[str, Any]:
    """What consumers, producers and admin clients share."""
    return {
        "bootstrap.servers": bootstrap_servers(kafka),
        "client.id": client_id,
        "retry.backoff.ms": 10,  # back-to-back transactions: p99 128 ms with the default of 100
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "socket.keepalive.enable": True,
        # The default forgets every broker when all are away at once; librdkafka 2.16 then waits in
        # send_offsets_to_transaction for one of the forgotten, without end.
        "metadata.recovery.strategy": "none",
        **kafka.client,
    }


def consumer_config(
    kafka: KafkaConfig, client_id: str, group_id: str | None = None
) -> dict[str, Any]:
    """A consumer of records up to the largest message. Without a group it may only assign()."""
    # librdkafka refuses less than its own default of message.max.bytes.
    fetch_bytes = max(kafka.limits.largest_message_bytes, MIB)
    grouped: dict[str, Any] = {"group.protocol": kafka.group_protocol}
    if kafka.group_protocol == "classic":
        grouped |= {
            "session.timeout.ms": kafka.session_timeout_ms,
            "heartbeat.interval.ms": min(3000, kafka.session_timeout_ms // 3),
            "partition.assignment.strategy": "cooperative-sticky",
        }
    return {
        **common_config(kafka, client_id),
        "group.id": group_id or f"{client_id}.unused",
        **(grouped if group_id else {}),
        "auto.offset.reset": "error",
        "fetch.queue.backoff.ms": 10,  # the default of 1,000 costs a factor 1.5 to 7
        "fetch.wait.max.ms": 100,
        "fetch.max.bytes": fetch_bytes,
        "max.partition.fetch.bytes": fetch_bytes,
        "receive.message.max.bytes": fetch_bytes + MIB,
        "queued.max.messages.kbytes": 128 * 1024,
        **FIXED_CONSUMER,
    }


def producer_config(
    kafka: KafkaConfig, client_id: str, transactional_id: str | None = None
) -> dict[str, Any]:
    largest = kafka.limits.largest_message_bytes
    transactional: dict[str, Any] = {}
    if transactional_id:
        transactional = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": kafka.transaction_timeout_ms,
        }
    return {
        **common_config(kafka, client_id),
        "message.max.bytes": largest,
        # A topic's limit is for the whole batch, and librdkafka does not split one that is over it.
        "batch.size": min(MIB, kafka.limits.row_message_bytes, kafka.limits.group_message_bytes),
        "linger.ms": 1,
        "queue.buffering.max.kbytes": max(256 * 1024, 4 * largest // 1024),
        "delivery.timeout.ms": max(120_000, 2 * kafka.transaction_timeout_ms)
        if not transactional_id
        else kafka.transaction_timeout_ms,
        **transactional,
        **FIXED_PRODUCER,
    }
