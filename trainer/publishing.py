"""What the trainer says on `control`, in transactions under one transactional id.

A second trainer takes the id over; from then on the first can't say anything and raises Fenced.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas import topics as keys
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced
from schemas.kafka_errors import FENCED
from schemas.records import CheckpointRecorded, Fatal, Finished, PolicyVersion, Record
from schemas.settling import settle
from schemas.topics import Topics

DEADLINE_S = 60.0
ATTEMPT_S = 2.0  # so long may a silent broker delay a stop
_KEYS: dict[type[Record], str] = {
    PolicyVersion: keys.CONTROL_POLICY,
    CheckpointRecorded: keys.CONTROL_CHECKPOINT,
    Fatal: keys.CONTROL_FATAL,
    Finished: keys.CONTROL_FINISHED,
}
_log = logging.getLogger(__name__)


class Interrupted(Exception):
    """`stop` was set while Kafka did not answer."""


class ControlPublisher:
    """`token` tells this trainer's directories from those of every other one.

    Both calls raise Fenced, DeadlineExceeded, and Interrupted where `stop` is set and Kafka does
    not answer; after the last two `control` must be read again: it may have happened.
    """

    def __init__(self, kafka: KafkaConfig, topics: Topics, stop: threading.Event) -> None:
        self._stop = stop
        self.token = secrets.token_hex(4)
        self._topic = topics.control
        self._id = topics.transactional_id("trainer")
        self._producer = Producer(
            producer_config(kafka, f"{topics.run_id}.trainer.publisher", self._id)
        )

    def take_over(self) -> None:
        """Fences every earlier trainer of the run. Comes first."""
        deadline = _deadline()
        self._retried("init_transactions", self._producer.init_transactions, deadline)
        settle(
            self._producer,
            [(self._topic, 0)],
            lambda name, call: self._retried(name, call, deadline),
        )

    def publish(self, *records: Record) -> None:
        """All of `records` or none."""
        deadline = _deadline()
        while True:
            try:
                self._producer.begin_transaction()
                for record in records:
                    self._producer.produce(
                        self._topic, encode(record), _KEYS[type(record)].encode(), partition=0
                    )
                self._retried("commit_transaction", self._producer.commit_transaction, deadline)
                return
            except KafkaException as error:
                problem = error.args[0]
                self._raise_if_fenced(problem)
                if not problem.txn_requires_abort() or time.monotonic() > deadline:
                    raise
                _log.warning("%s: %s; written again", self._topic, problem.str())
                self._retried("abort_transaction", self._producer.abort_transaction, deadline)

    def _retried(self, name: str, call: Callable[[float], None], deadline: float) -> None:
        while True:
            try:
                return call(ATTEMPT_S)
            except KafkaException as error:
                problem = error.args[0]
                self._raise_if_fenced(problem)
                if not problem.retriable():
                    raise
                if self._stop.is_set():
                    raise Interrupted(name) from error
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{name} of {self._id} did not succeed within {DEADLINE_S:.0f} s: "
                        f"{problem.str()}; does the broker answer?"
                    ) from error

    def _raise_if_fenced(self, problem: KafkaError) -> None:
        if problem.code() in FENCED:
            raise Fenced(
                f"a newer trainer took over {self._id}: this one ends; a run has one trainer"
            ) from KafkaException(problem)


def _deadline() -> float:
    return time.monotonic() + DEADLINE_S
