"""Replays and drops dead letters: records for `rows` and marks in `dlq`, in one transaction.

A killed replay leaves both or neither. All tools of a run share one transactional id: a newer one
fences the older, and what that had committed is known before the newer one reads `dlq`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from infra.inspection.errors import NothingWritten
from infra.inspection.letters import Letter, Mark, Resolution, mark_headers
from infra.inspection.stored import Place
from schemas.clients import producer_config
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced
from schemas.kafka_errors import FENCED
from schemas.settling import settle
from schemas.topics import Topics

ROLE = "dlq-tool"
DEADLINE_S = 60.0
STEP_S = 5.0  # of one blocking call


class Replay(NamedTuple):
    """A letter as it came, and the partition of `rows` that it goes to."""

    letter: Letter
    key: bytes | None
    value: bytes | None
    partition: int


class Resolver:
    """One thread."""

    def __init__(self, kafka: KafkaConfig, topics: Topics) -> None:
        """Fences another tool of this run, and ends what it left.

        Raises NothingWritten, Fenced, DeadlineExceeded.
        """
        self._topics = topics
        self._id = topics.transactional_id(ROLE)
        self._producer = Producer(producer_config(kafka, self._id, self._id))
        self._failures: list[KafkaError] = []
        self._until_done("init_transactions", self._producer.init_transactions)
        self._settle(kafka.num_partitions)

    def replay(self, batch: Sequence[Replay]) -> list[Letter]:
        """The letters with their marks. Raises NothingWritten, Fenced, DeadlineExceeded."""
        return self._in_transaction(partial(self._replay, batch))

    def drop(self, letters: Sequence[Letter]) -> list[Letter]:
        """As replay(); nothing is deleted."""
        return self._in_transaction(
            lambda: [self._mark(letter, Resolution.DROPPED, None) for letter in letters]
        )

    def close(self) -> None:
        self._producer.close()

    def _settle(self, num_partitions: int) -> None:
        places = [
            (topic, partition)
            for topic in (self._topics.rows, self._topics.dlq)
            for partition in range(num_partitions)
        ]
        try:
            settle(self._producer, places, self._until_done)
        except KafkaException as error:
            self._abort(error)
            raise NothingWritten(
                "what an earlier tool may have left open could not be ended, and nothing was "
                f"resolved: {error.args[0].str()}; try again"
            ) from error
        except DeadlineExceeded:
            with suppress(KafkaException):  # else the next tool ends it, or the broker in time
                self._producer.abort_transaction(STEP_S)
            raise

    def _replay(self, batch: Sequence[Replay]) -> list[Letter]:
        """A mark names the place of the copy, so the copies are written first."""
        places: dict[Place, Place] = {}

        def delivered(letter: Place, error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self._failures.append(error)
            else:
                places[letter] = Place(message.partition(), message.offset())

        for each in batch:
            self._produce(
                self._topics.rows,
                each.partition,
                each.key,
                each.value,
                on_delivery=partial(delivered, each.letter.place),
            )
        self._flush()
        return [
            self._mark(each.letter, Resolution.REPLAYED, places[each.letter.place])
            for each in batch
        ]

    def _mark(self, letter: Letter, resolution: Resolution, to: Place | None) -> Letter:
        mark = Mark(letter.place.offset, resolution, int(time.time() * 1000), to)
        self._produce(
            self._topics.dlq, letter.place.partition, None, None, headers=mark_headers(mark)
        )
        return letter.marked(mark)

    def _in_transaction(self, write: Callable[[], list[Letter]]) -> list[Letter]:
        self._failures.clear()
        try:
            self._producer.begin_transaction()
            resolved = write()
            self._until_done("commit_transaction", self._producer.commit_transaction)
        except KafkaException as error:
            self._abort(error)
            raise NothingWritten(
                f"none of these letters was resolved: {error.args[0].str()}; try again"
            ) from error
        return resolved

    def _abort(self, cause: KafkaException) -> None:
        try:
            if cause.args[0].fatal():
                raise cause
            self._until_done("abort_transaction", self._producer.abort_transaction)
        except KafkaException as error:
            if error.args[0].code() not in FENCED:
                raise
            raise Fenced(
                f"another tool opened {self._id}, or this one was paused for too long: this batch "
                "was not written; `groupstream dlq list` shows what is open"
            ) from error

    def _produce(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, **more: Any
    ) -> None:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._producer.produce(topic, value, key, partition, **more)
                self._producer.poll(0)
                return
            except BufferError as error:
                if time.monotonic() > end:
                    raise self._late("the producer's queue stayed full") from error
                self._producer.poll(0.1)

    def _flush(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while self._producer.flush(STEP_S):
            if time.monotonic() > end:
                raise self._late("records were not acknowledged")
        if self._failures:
            raise KafkaException(self._failures[0])

    def _until_done(self, name: str, call: Callable[[float], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                call(STEP_S)
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
                if time.monotonic() > end:
                    raise self._late(f"{name} did not end") from error

    def _late(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._id}: {what} within {DEADLINE_S:.0f} s: does the broker answer? The last batch "
            "was written whole or not at all: `groupstream dlq list` shows what is still open"
        )
