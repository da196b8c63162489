"""The assembler's process: one loop around the pure core, one thread, one transaction at a time.

               what it waits for                          what wakes it
    ┌────▶ rows      consumer.poll, <= 100 ms             a row, a request, a rebalance
    │          │
    │      control   looked at every turn                 policy: offers every held group
    │          │                                          fatal, finished: ends
    │      assembler.receive / announce / offer_held      a held group's backoff has passed
    │          │
    │      re-read   a second consumer, never waits       payloads that were let go arrive
    │          │
    │      teachers  threads of their own, never waits    an answer came, a teacher is idle
    │          │
    │      decisions produced into the open transaction
    │          │
    └───── commit    groups in it: when nothing waits in the consumer's queue, or 50 ms after its
                     first record; none in it: every 100 ms, if anything changed

A rebalance calls back inside poll: assigned = read the commit, begin there; revoked = commit or
abort, then forget; lost = abort, then forget. A void transaction = abort, forget every partition,
read the commits again, seek. So after any crash the next process begins at the same commit.
"""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from consumers.assembler import Assembler
from consumers.committed import CommittedState
from consumers.decisions import DeadLetter, Decision, EmitEvent, EmitGroup
from consumers.reporting import counters_of, doing_of
from consumers.reread import Rereader, incoming_of
from consumers.teachers.attending import Attending
from consumers.teachers.opened import opened, teacher_of_agent
from consumers.teachers.pool import Teachers
from consumers.transaction import Transactions, Void, Writes
from consumers.turn import Now
from consumers.voids import Voids
from consumers.written import headers_of
from schemas.clients import consumer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import (
    DeadlineExceeded,
    Fenced,
    ManifestMismatch,
    OffsetsLost,
)
from schemas.identity import key_of
from schemas.manifest import require_manifest
from schemas.records import Manifest
from schemas.status import Status, now_ms, reported
from schemas.topics import Topics

ROLE = "assembler"
POLL_S = 0.1  # a longer poll would keep a policy record waiting
POLL_WAITING_S = 0.01  # while groups wait for exactly that record, or for payloads
BATCH = 256
BUSY_COMMIT_S = 0.05
QUIET_COMMIT_S = 0.1
REPORT_S = 0.5
START_S = 60.0
REBALANCE_S = 30.0  # the group waits meanwhile
END_S = 10.0
SEEK_S = 10.0
SEEK_AGAIN = (KafkaError._STATE, KafkaError._PREV_IN_PROGRESS, KafkaError._TIMED_OUT)

log = logging.getLogger(__name__)


def run(config: Config, *, instance: str, stop: threading.Event) -> None:
    """Until `control` says finished or `stop` is set.

    Raises ConfigError, ManifestMismatch, RunStopped on `fatal`, Fenced, OffsetsLost,
    MetadataUnreadable, TransactionsFail, DeadlineExceeded.
    """
    topics = Topics(config.run.id)
    with (
        closing(opened(config, instance)) as teachers,
        reported(config.kafka, topics, ROLE, instance) as status,
    ):
        worker = Worker(config, topics, instance, status, teachers)
        try:
            worker.start()
            while not (stop.is_set() or worker.is_finished):
                worker.turn()
            worker.finish()
        finally:
            worker.close()


class Worker:
    def __init__(
        self, config: Config, topics: Topics, instance: str, status: Status, teachers: Teachers
    ) -> None:
        client_id = topics.transactional_id(ROLE, instance)
        self._topics = topics
        self._status = status
        # First of all: a predecessor's open transaction ends here, before anything is read.
        self._transactions = Transactions(config.kafka, client_id, client_id, self._waits)
        self._control = ControlLog(config.kafka, topics, client_id)
        self._control.read_to_end(START_S)
        self._control.state.raise_if_fatal()
        self.is_finished = self._control.state.finished is not None
        manifest = require_manifest(self._control.state, config)
        self._assembler = Assembler(
            manifest, config.kafka.assembler_memory_bytes, teacher_of_agent(config.teachers)
        )
        self._assembler.announce(self._control.state.highest_version, _now())
        self._committed = CommittedState(config.kafka, topics, manifest, self._waits)
        self._consumer = Consumer(
            consumer_config(config.kafka, client_id, topics.assembler_group),
            logger=logging.getLogger(f"{__name__}.librdkafka"),
        )
        self._rereader = Rereader(config.kafka, topics, client_id)
        self._attending = Attending(self._assembler, teachers)
        self._paused: list[TopicPartition] = []  # assigned during this poll
        self._has_lost_its_place = False
        self._voids = Voids(f"{topics.groups}, {topics.events} and {topics.dlq}")
        self._committed_s = time.monotonic()
        self._reported_s = 0.0
        self._require_partitions(manifest)
        self._transactions.settle(_writes(manifest, topics))

    def start(self) -> None:
        self._consumer.subscribe(
            [self._topics.rows],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def turn(self) -> None:
        try:
            self._follow_control()
            messages = self._arrived()
            if self._has_lost_its_place:
                raise Void("the transaction ended with the partitions it was for", may_pass=True)
            now = _now()
            for message in messages:
                self._carry_out(self._assembler.receive(incoming_of(message), now))
            self._carry_out(self._assembler.offer_held(now))
            for incoming in self._rereader.read(self._assembler.payloads_wanted()):
                self._carry_out(self._assembler.restore(incoming, now))
            self._carry_out(self._attending.turn(now))
            if self._is_due(queue_is_empty=len(messages) < BATCH):
                self._flush()
        except Void as error:
            log.warning("transaction void, reading the commits again: %s", error)
            if not error.may_pass:
                time.sleep(self._voids.count(str(error), time.monotonic()))
            self._start_over()
        self._report()

    def finish(self) -> None:
        """A last commit; what is not committed is assembled again by whoever comes next."""
        self._status.turn("ending: commits for the last time")
        try:
            self._flush(END_S)
        except Void as error:
            log.warning("last transaction void: %s", error)

    def close(self) -> None:
        """Leaves the group at once, so that others take over without waiting for the session."""
        self._assembler.drop(list(self._assembler.partitions))
        self._transactions.close(END_S)
        self._rereader.close()
        self._consumer.close()
        self._control.close()

    def _arrived(self) -> list[Any]:
        """Records in hand. Those of a partition that was assigned meanwhile are older than that."""
        message = self._consumer.poll(self._wait_s())
        messages = [] if message is None else [message, *self._consumer.consume(BATCH - 1, 0)]
        fresh = {partition.partition for partition in self._paused}
        if self._paused:
            self._consumer.resume(self._paused)
            self._paused = []
        return [m for m in messages if self._is_record(m) and m.partition() not in fresh]

    def _is_record(self, message: Any) -> bool:
        error: KafkaError | None = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise OffsetsLost(
                f"partition {message.partition()} of {self._topics.rows} can't be read at offset "
                f"{message.offset()} ({error.str()}): rows of unsettled tasks are gone; raise the "
                "topic's retention, and start a new run from the last checkpoint"
            )
        if error.code() in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FENCED):
            raise Fenced(f"a newer process took over: {error.str()}")
        if error.fatal():
            raise KafkaException(error)
        log.warning("consumer: %s", error.str())
        return False

    def _wait_s(self) -> float:
        if self._transactions.carries_groups:
            return 0.0
        waiting = self._assembler.buffered.waiting() or self._assembler.enrichment.waiting()
        wait_s = POLL_WAITING_S if waiting else POLL_S
        if self._transactions.opened_s is not None or self._assembler.has_changed:
            wait_s = min(wait_s, self._committed_s + QUIET_COMMIT_S - time.monotonic())
        return max(wait_s, 0.0)

    def _is_due(self, *, queue_is_empty: bool) -> bool:
        now_s, opened_s = time.monotonic(), self._transactions.opened_s
        if self._transactions.carries_groups and opened_s is not None:
            return queue_is_empty or now_s - opened_s >= BUSY_COMMIT_S
        return now_s - self._committed_s >= QUIET_COMMIT_S and self._assembler.has_changed

    def _waits(self, what: str) -> None:
        self._status.turn(f"waits for {what}")

    def _flush(self, deadline_s: float | None = None) -> None:
        points = self._assembler.commit_points()
        if points:
            self._transactions.commit(self._topics.rows, points, self._consumer, deadline_s)
            self._assembler.mark_committed()
            self._voids.end()
        self._committed_s = time.monotonic()

    def _start_over(self) -> None:
        """Aborts and begins again at the commits of the partitions that are still ours."""
        self._has_lost_its_place = False
        self._transactions.abort()
        self._assembler.drop(list(self._assembler.partitions))
        numbers = [partition.partition for partition in self._consumer.assignment()]
        self._status.turn(f"reads the commits of partitions {numbers} again")
        for place in self._adopt(numbers):
            self._seek(place)

    def _seek(self, place: TopicPartition) -> None:
        """Tries again while the assignment of the partition is still on its way."""
        end = time.monotonic() + SEEK_S
        while True:
            try:
                self._consumer.seek(place)
                return
            except KafkaException as error:
                if error.args[0].code() not in SEEK_AGAIN:
                    raise
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"{place.topic} partition {place.partition} could not be sought to "
                        f"{place.offset} within {SEEK_S:.0f} s: {error.args[0].str()}"
                    ) from error
                time.sleep(0.01)

    def _adopt(self, numbers: list[int]) -> list[TopicPartition]:
        """Their state as committed; returns where to read on."""
        places = []
        for found in self._committed.read(self._consumer, numbers) if numbers else ():
            self._assembler.assign(found.partition, found.offset, found.settled, found.seen)
            places.append(TopicPartition(self._topics.rows, found.partition, found.offset))
            log.info(
                "partition %d from offset %d, seen %d, watermark %d",
                found.partition,
                found.offset,
                found.seen,
                found.settled.watermark,
            )
        return places

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = sorted(partition.partition for partition in partitions)
        self._end_transaction()  # a long wait for commits would leave it open for too long
        self._status.turn(f"reads the commits of partitions {numbers}")
        places = self._adopt(numbers)
        consumer.incremental_assign(places)
        # Until the records in hand are sorted out: some may be of an earlier assignment.
        consumer.pause(places)
        self._paused += places

    def _on_revoke(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._end_transaction()
        self._forget(partitions)

    def _end_transaction(self) -> None:
        """Commits, or aborts; then the next turn starts over."""
        try:
            self._flush(REBALANCE_S)
        except Void as error:
            log.warning("partitions move, transaction void: %s", error)
            self._transactions.abort()
            self._has_lost_its_place = True

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        log.warning("lost partitions %s", [partition.partition for partition in partitions])
        self._transactions.abort()
        self._has_lost_its_place = True
        self._forget(partitions)

    def _forget(self, partitions: list[TopicPartition]) -> None:
        gone = {partition.partition for partition in partitions}
        self._assembler.drop(gone)
        self._paused = [p for p in self._paused if p.partition not in gone]

    def _follow_control(self) -> None:
        if not self._control.poll():
            return
        state = self._control.state
        state.raise_if_fatal()
        self._carry_out(self._assembler.announce(state.highest_version, _now()))
        self.is_finished = state.finished is not None

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        topics, produce = self._topics, self._transactions.produce
        for decision in decisions:
            match decision:
                case EmitGroup(partition, task_index, value):
                    produce(topics.groups, partition, key_of(task_index), value)
                    self._transactions.carries_groups = True
                case EmitEvent(partition, event):
                    produce(topics.events, partition, key_of(event.task_index), encode(event))
                case DeadLetter():
                    headers = headers_of(decision, topics.rows)
                    produce(topics.dlq, decision.partition, decision.key, decision.value, headers)

    def _require_partitions(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch where a topic has another partition count than the run."""
        found = self._consumer.list_topics(timeout=START_S).topics
        for name in (self._topics.rows, self._topics.groups, self._topics.events, self._topics.dlq):
            count = len(found[name].partitions) if name in found else 0
            if count != manifest.num_partitions:
                raise ManifestMismatch(
                    f"{name} has {count} partitions, the run was created with "
                    f"{manifest.num_partitions}: tasks would change their partition; restore the "
                    "topic, or start a new run under another run.id"
                )

    def _report(self) -> None:
        if time.monotonic() - self._reported_s < REPORT_S:
            self._status.turn()
            return
        self._reported_s = time.monotonic()
        numbers = sorted(self._assembler.partitions)
        self._status.turn(doing_of(self._assembler, numbers))
        counters = counters_of(self._assembler, self._transactions.committed)
        self._status.counters = counters | self._attending.counters


def _writes(manifest: Manifest, topics: Topics) -> Writes:
    names = (topics.groups, topics.events, topics.dlq)
    places = [(name, number) for name in names for number in range(manifest.num_partitions)]
    return Writes(places, topics.assembler_group, TopicPartition(topics.rows, 0, 0))


def _now() -> Now:
    return Now(now_ms(), time.monotonic())
