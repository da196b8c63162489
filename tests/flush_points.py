"""Named places in the assembler's loop, reached through the Kafka clients that it makes.

`PRODUCED`, `OFFERED`, `COMMITTED` come in this order in every flush that carries groups; `ASSIGNED`
and `REVOKING` lie inside rebalance callbacks. The product knows nothing of them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import confluent_kafka

from consumers import transaction, worker

PRODUCED = "produced"  # the first group is in the open transaction, nothing is offered to commit
OFFERED = "offered"  # between send_offsets_to_transaction and commit_transaction
COMMITTED = "committed"  # after commit_transaction, before anything else
ASSIGNED = "assigned"  # inside on_assign, after the commits were read
REVOKING = "revoking"  # inside on_revoke, before the flush
POINTS = (PRODUCED, OFFERED, COMMITTED, ASSIGNED, REVOKING)
WRITTEN_S = 10.0


def act_at(point: str, number: int, act: Callable[[], None]) -> None:
    """From now on this process's assembler calls `act` the `number`-th time it reaches `point`."""
    counts: Counter[str] = Counter()

    def reached(name: str) -> None:
        counts[name] += 1
        if name == point and counts[name] == number:
            act()

    transaction.Producer = _producer_class(reached)  # type: ignore[misc]
    worker.Consumer = _consumer_class(reached)  # type: ignore[misc]


def _producer_class(reached: Callable[[str], None]) -> type[confluent_kafka.Producer]:
    class Producer(confluent_kafka.Producer):
        carries_groups = False  # the open transaction
        has_offered = False

        def begin_transaction(self) -> None:
            super().begin_transaction()
            self.carries_groups = self.has_offered = False

        def produce(self, topic: str, value: bytes | None, *rest: Any, **named: Any) -> None:
            super().produce(topic, value, *rest, **named)
            is_group = topic.endswith(".groups") and value is not None  # else it settles
            if is_group and not self.carries_groups:
                self.carries_groups = True
                assert self.flush(WRITTEN_S) == 0  # the broker has it
                reached(PRODUCED)

        def send_offsets_to_transaction(self, *rest: Any) -> None:
            super().send_offsets_to_transaction(*rest)
            if self.carries_groups:
                reached(OFFERED)

        def commit_transaction(self, *rest: Any) -> None:
            super().commit_transaction(*rest)
            if self.carries_groups:
                reached(COMMITTED)

    return Producer


def _consumer_class(reached: Callable[[str], None]) -> type[confluent_kafka.Consumer]:
    class Consumer(confluent_kafka.Consumer):
        def subscribe(self, topics: list[str], **callbacks: Any) -> None:
            on_revoke = callbacks["on_revoke"]

            def revoking(*rest: Any) -> None:
                reached(REVOKING)
                on_revoke(*rest)

            super().subscribe(topics, **callbacks | {"on_revoke": revoking})

        def incremental_assign(self, partitions: list[Any]) -> None:
            reached(ASSIGNED)
            super().incremental_assign(partitions)

    return Consumer
