"""A transaction that changes nothing, so that whatever a predecessor left open is over.

init_transactions ends a predecessor's transaction, if the broker still knows of it. A broker that
was killed was seen to forget the end of one in single partitions (Kafka 4.4: after a full disk, and
with a hasty transaction.abort.timed.out.transaction.cleanup.interval.ms): readers wait there for
ever, or the next commit of the same producer shows what had been aborted. An abort that names
every partition writes the missing ends.
"""

from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

KEY = b"settling"

Retried = Callable[[str, Callable[[float], Any]], None]


def settle(
    producer: Producer,
    places: Iterable[tuple[str, int]],
    retried: Retried,
    offset: TopicPartition | None = None,
    group: Any = None,
) -> None:
    """After init_transactions, before anything is read. `places`: all that it ever writes to.

    `offset` is one that `group` commits; it stays as it is. `retried(name, call)` runs a call of
    the producer, which gets a timeout in seconds, with the caller's patience and errors. After any
    error the transaction is still to be aborted.
    """
    producer.begin_transaction()
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Any) -> None:
        if error is not None:
            failed.append(error)

    for topic, partition in places:
        producer.produce(topic, None, KEY, partition, on_delivery=delivered)
    # An abort purges what was not sent, and only what was sent is told of the abort.
    retried("flush", lambda timeout_s: _flushed(producer, timeout_s))
    if failed:
        raise KafkaException(failed[0])
    if offset is not None:
        retried(
            "send_offsets_to_transaction",
            lambda timeout_s: producer.send_offsets_to_transaction([offset], group, timeout_s),
        )
    retried("abort_transaction", producer.abort_transaction)


def _flushed(producer: Producer, timeout_s: float) -> None:
    left = producer.flush(timeout_s)
    if left > 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{left} unsent", False, True))
