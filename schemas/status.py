"""The line that every process writes to `status` once a second: what it does or waits for now."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from confluent_kafka import Producer

from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import KafkaConfig
from schemas.records import Heartbeat, RunningAttempt
from schemas.topics import Topics

PERIOD_S = 1.0
CLOSE_TIMEOUT_S = 2.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class Status:
    """Set by the main loop, read by the writing thread. Each assignment is atomic."""

    role: str
    instance: str
    doing: str = "starting"
    doing_since_ms: int = field(default_factory=now_ms)
    loop_at_ms: int = field(default_factory=now_ms)
    counters: dict[str, float] = field(default_factory=dict)
    running: list[RunningAttempt] = field(default_factory=list)
    committed_seq: dict[str, int] = field(default_factory=dict)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))

    def turn(self, doing: str | None = None) -> None:
        """The main loop is alive, and does `doing` (unchanged where None)."""
        self.loop_at_ms = now_ms()
        if doing is not None and doing != self.doing:
            self.doing, self.doing_since_ms = doing, self.loop_at_ms

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            role=self.role,
            instance=self.instance,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            at_ms=now_ms(),
            loop_at_ms=self.loop_at_ms,
            doing=self.doing,
            doing_since_ms=self.doing_since_ms,
            counters=dict(self.counters),
            running=list(self.running),
            committed_seq=dict(self.committed_seq),
        )


@contextmanager
def reported(kafka: KafkaConfig, topics: Topics, role: str, instance: str) -> Iterator[Status]:
    """Writes the heartbeat of the Status it yields, until the block ends; then one last time."""
    status = Status(role, instance)
    client_id = f"{topics.run_id}.{role}.{instance}.status".replace("/", ".")
    # A heartbeat that could not be sent is worthless a few seconds later.
    producer = Producer(producer_config(kafka, client_id) | {"delivery.timeout.ms": 5000})
    stopped = threading.Event()

    def send() -> None:
        producer.produce(
            topics.status, encode(status.heartbeat()), f"{role}/{instance}".encode(), partition=0
        )
        producer.poll(0)

    def write() -> None:
        while not stopped.wait(PERIOD_S):
            send()

    send()
    thread = threading.Thread(target=write, name="status", daemon=True)
    thread.start()
    try:
        yield status
    except BaseException as error:
        status.turn(f"ended: {type(error).__name__}: {error}"[:500])
        raise
    else:
        status.turn("ended")
    finally:
        stopped.set()
        thread.join(CLOSE_TIMEOUT_S)
        send()
        producer.flush(CLOSE_TIMEOUT_S)
