"""The dispatcher: keeps every slot of the targets v..v+lead covered with a task.

    control ── policy v, fatal, finished ──┐
    events ─── accepted, failed, ... ──────┤        ┌─▶ prompts.<shard>  ┐
    status ─── heartbeats of the shards ───┤        ├─▶ dispatch: ledger │ one transaction,
                                           ▼        ├─▶ control          │ all or nothing
                                   planning (pure) ─┴─▶ offsets          ┘
                                           │
                                           └─ after the commit ─▶ rows: cancel, attempt failed

It wakes at an event or every 20 ms. At its start it fences a predecessor, then reads the ledger,
`control`, `status` and `events` to their ends, and only then acts. kill -9 at any point loses
nothing: what was not committed did not happen, and the same events are read again.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from producers.dataset import Dataset
from producers.decisions import SendPrompt
from producers.dispatch_words import described, log_decision
from producers.liveness import Liveness
from producers.outgoing import ROLE, Addressing
from producers.planning import Planner, Rules, is_current
from producers.prompts import Prompter
from producers.restoring import READ_S, committed_offsets, read_ledger, require_partitions
from producers.routing import Router
from producers.tail import Tail
from producers.transactions import Aborted, Outgoing, RequestWriter, Transactions
from schemas import topics as keys
from schemas.codec import decode_as
from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import DeadlineExceeded
from schemas.limits import BATCH_OVERHEAD
from schemas.manifest import require_dataset, require_manifest
from schemas.records import EventKind, GroupEvent, Heartbeat, Manifest, NextTaskIndex
from schemas.status import Status, now_ms, reported
from schemas.topics import Topics

POLL_S = 0.02
LIVENESS_S = 0.5
OFFSETS_S = 1.0  # events that change nothing are committed this often
MOST_ABORTS = 10  # in a row

logger = logging.getLogger(__name__)


def run(config: Config, *, stop: threading.Event) -> None:
    """Returns when the run has finished or `stop` is set.

    Raises DatasetError, ManifestMismatch, RunStopped (fatal), Fenced (a newer dispatcher runs),
    OffsetsLost and DeadlineExceeded.
    """
    topics = Topics(config.run.id)
    with ExitStack() as stack:
        status = stack.enter_context(reported(config.kafka, topics, ROLE, "0"))
        control = stack.enter_context(
            closing(ControlLog(config.kafka, topics, f"{topics.run_id}.{ROLE}"))
        )
        status.turn("reading control and checking the dataset")
        manifest = require_manifest(control.read_to_end(), config)
        require_dataset(manifest, config)
        dataset = stack.enter_context(closing(open_dataset(config)))
        dispatcher = Dispatcher(
            config, topics, manifest=manifest, control=control, dataset=dataset, status=status
        )
        stack.enter_context(closing(dispatcher))
        dispatcher.run(stop)


def open_dataset(config: Config) -> Dataset:
    """The configured dataset, checked. Raises DatasetError."""
    return Dataset.open(
        config.data.train_jsonl_fpath,
        group_size=config.grpo.num_generations_per_prompt,
        shard_of_agent=config.shard_of_agent,
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
        max_prompt_bytes=config.kafka.max_row_bytes,
    )


def rules_of(config: Config, manifest: Manifest) -> Rules:
    return Rules(
        first_step=manifest.first_step,
        first_task_index=manifest.first_task_index,
        num_partitions=manifest.num_partitions,
        slots=manifest.num_prompts_per_step,
        group_size=manifest.num_generations_per_prompt,
        lead=manifest.lead,
        max_age=manifest.max_trajectory_age_steps,
        max_attempts=config.env.max_attempts,
        max_failures=config.grpo.async_grpo.max_generation_failures,
        max_epochs=config.grpo.max_num_epochs,
        max_steps=config.grpo.max_num_steps,
    )


class Dispatcher:
    """The Kafka side: reads, lets the planner decide, carries out. One thread."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        *,
        manifest: Manifest,
        control: ControlLog,
        dataset: Dataset,
        status: Status,
    ) -> None:
        kafka, name = config.kafka, f"{topics.run_id}.{ROLE}"
        self._topics = topics
        self._manifest = manifest
        self._control = control
        self._dataset = dataset
        self._prompter = Prompter(manifest, config.env.attempt_deadline_s)
        self._address = Addressing(
            topics, self._prompter, dataset, kafka.limits.row_message_bytes - BATCH_OVERHEAD
        )
        self._status = status
        self._rules = rules_of(config, manifest)
        self._router = Router(config.shard_of_agent, manifest.shards)
        self._liveness = Liveness(
            status.incarnation, config.env.attempt_deadline_s, time.monotonic()
        )
        self._events = Tail(kafka, topics.events, f"{name}.events", topics.dispatcher_group)
        self._heartbeats = Tail(kafka, topics.status, f"{name}.status")
        self._dispatch = Tail(kafka, topics.dispatch, f"{name}.dispatch")
        self._writer = Transactions(kafka, name, topics.transactional_id(ROLE))
        self._requests = RequestWriter(
            kafka, f"{name}.requests", topics.rows, manifest.num_partitions
        )
        self._planner: Planner
        self._attempts_failed = 0
        self._committed: dict[int, int] = {}
        self._commit_at_s = 0.0
        self._check_at_s = 0.0

    def run(self, stop: threading.Event) -> None:
        self._status.turn("taking over from a predecessor, if there is one")
        self._writer.open()
        require_partitions(self._events, self._topics, self._manifest)
        self._writer.settle(
            self._places(), TopicPartition(self._topics.events, 0, 0), self._events.group_metadata()
        )
        self._read_heartbeats()
        self._control.read_to_end()
        self._restore()
        aborts = 0
        while not stop.is_set():
            state = self._control.state
            state.raise_if_fatal()
            if state.finished is not None:
                logger.info("the run has finished after step %d", state.finished.step)
                return
            try:
                if self._turn():
                    aborts = 0
            except Aborted as error:
                aborts += 1
                logger.warning("transaction aborted, reading the ledger again: %s", error)
                if aborts > MOST_ABORTS:
                    raise DeadlineExceeded(
                        f"{aborts} transactions in a row were aborted, the last because: {error}"
                    ) from error
                self._restore()

    def close(self) -> None:
        self._requests.close()
        for tail in (self._events, self._heartbeats, self._dispatch):
            tail.close()

    def _turn(self) -> bool:
        """Reads what has arrived and carries out what is due; True where that was committed."""
        self._control.poll()
        self._take_heartbeats()
        news = self._take_events(POLL_S, live=True)
        news |= self._take_version()
        now_s = time.monotonic()
        due_s = self._planner.next_due_s
        committed = False
        if news or (due_s is not None and due_s <= now_s):
            committed = self._step(now_s)
        elif self._events.positions != self._committed and now_s >= self._commit_at_s:
            self._commit([])
        for cancel in self._planner.take_cancels():
            logger.info("task %d is given up: %s", cancel.task.task_index, cancel.task.reason)
            self._requests.send(self._prompter.request(cancel))
        self._check_liveness(now_s)
        self._requests.poll()
        self._report()
        return committed

    def _step(self, now_s: float) -> bool:
        """One transaction with everything that is due. False where nothing is."""
        written = self._planner.plan(now_s, now_ms())
        records = [self._address.of(decision) for decision in written]
        before = self._control.state.next_task_index
        totals = self._planner.ledger.totals
        if totals.next_task_index != before and any(isinstance(d, SendPrompt) for d in written):
            following = NextTaskIndex(task_index=totals.next_task_index)
            records.append(self._address.on_control(keys.CONTROL_NEXT_TASK_INDEX, following))
        changes = self._planner.ledger.take_changes()
        if not changes:
            return False
        self._commit([*records, *(self._address.on_ledger(key, record) for key, record in changes)])
        for decision in written:
            log_decision(decision)
        return True

    def _commit(self, records: Sequence[Outgoing]) -> None:
        offsets = [
            TopicPartition(self._topics.events, partition, offset)
            for partition, offset in self._events.positions.items()
        ]
        offsets.append(TopicPartition(self._topics.control, 0, self._control.position))
        self._writer.commit(records, offsets, self._events.group_metadata())
        self._committed = dict(self._events.positions)
        self._commit_at_s = time.monotonic() + OFFSETS_S
        self._attempts_failed += self._planner.attempts_failed
        self._planner.attempts_failed = 0

    def _take_version(self) -> bool:
        version = self._control.state.highest_version
        if version < 0 or version == self._planner.version:
            return False
        self._planner.on_version(version)
        return True

    def _take_events(self, timeout_s: float, *, live: bool) -> bool:
        return self._fold(self._events.poll(timeout_s), live=live)

    def _fold(self, messages: Iterator[Any], *, live: bool) -> bool:
        """Folds events into the ledger; True where one may have changed it."""
        changed = False
        for message in messages:
            event = decode_as(message.value(), GroupEvent)
            now_s = time.monotonic()
            if event.kind is EventKind.STARTED:
                self._note_started(event, now_s, live=live)
            else:
                self._planner.on_event(event, now_s)
                changed = True
        return changed

    def _note_started(self, event: GroupEvent, now_s: float, *, live: bool) -> None:
        task = self._planner.ledger.tasks.get(event.task_index)
        if task is not None and is_current(task, event):
            executor = f"{event.shard}/{event.replica}"
            self._liveness.started(task, executor, now_s=now_s, live=live)

    def _take_heartbeats(self) -> None:
        for message in self._heartbeats.poll(0.0):
            self._hear(message.value())

    def _hear(self, payload: bytes | None) -> None:
        if payload is not None:
            heartbeat = decode_as(payload, Heartbeat)
            self._liveness.heard(heartbeat, now_s=time.monotonic(), now_ms=now_ms())

    def _check_liveness(self, now_s: float) -> None:
        if now_s < self._check_at_s:
            return
        self._check_at_s = now_s + LIVENESS_S
        for lost in self._liveness.failures(self._planner.ledger.tasks.values(), now_s):
            logger.warning(
                "task %d attempt %d is believed lost: %s: %s",
                lost.task.task_index, lost.task.attempt, lost.reason, lost.message,
            )  # fmt: skip
            self._requests.send(self._prompter.request(lost))

    def _restore(self) -> None:
        """The state of the last commit, then every event since."""
        self._status.turn("reading the ledger")
        ledger = read_ledger(self._dispatch, self._manifest)
        self._planner = Planner(self._rules, ledger, self._router, self._dataset, time.monotonic())
        self._events.start(committed_offsets(self._events, ledger, self._manifest))
        self._committed = dict(self._events.positions)
        self._fold(self._events.read_to_end(READ_S), live=False)
        logger.info(
            "ledger: %d dispatched, %d accepted, %d abandoned, %d outstanding, next task %d",
            ledger.totals.dispatched, ledger.totals.accepted, ledger.abandoned, len(ledger.tasks),
            ledger.totals.next_task_index,
        )  # fmt: skip

    def _places(self) -> list[tuple[str, int]]:
        """Every (topic, partition) that the ledger's transactions write to."""
        topics = self._topics
        prompts = [
            (topics.prompts(shard), number)
            for shard, replicas in self._manifest.shards.items()
            for number in range(replicas * keys.PARTITIONS_PER_REPLICA)
        ]
        return [(topics.dispatch, 0), (topics.control, 0), *prompts]

    def _read_heartbeats(self) -> None:
        """The newest line of every process, so that what runs now is known before acting."""
        self._status.turn("reading status")
        self._heartbeats.start({0: OFFSET_BEGINNING})
        newest: dict[bytes, bytes | None] = {}
        for message in self._heartbeats.read_to_end(READ_S):
            newest[message.key()] = message.value()
        for payload in newest.values():
            self._hear(payload)

    def _report(self) -> None:
        totals = self._planner.ledger.totals
        outstanding = len(self._planner.ledger.tasks)
        self._status.counters = {
            "version": -1 if self._planner.version is None else self._planner.version,
            "dispatched": totals.dispatched,
            "accepted": totals.accepted,
            "abandoned": self._planner.ledger.abandoned,
            **{f"abandoned/{reason}": n for reason, n in totals.abandoned.items()},
            "outstanding": outstanding,
            "next_task_index": totals.next_task_index,
            "failures_in_a_row": totals.failures_in_a_row,
            "attempts_failed": self._attempts_failed,
        }
        self._status.turn(described(self._planner, self._rules.first_step))
