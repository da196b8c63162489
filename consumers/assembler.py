"""Rows in any order in, complete ordered groups out: every rule of assembly, and nothing else.

Pure: no Kafka, no clock. Records and times are arguments, decisions are the result;
`consumers/worker.py` carries them out in transactions. Invariant, per partition: a task is open
(it holds the commit), or settled by exactly one `accepted` or `abandoned`, or not heard of.

What a single record causes (started, duplicate, late, poison, dead letter) is not decided again
below `seen`, where it was committed once. What an offer decides, and `abandoned`, always is.
"""

from collections.abc import Iterable, Iterator

from consumers.admission import Admission, Incoming
from consumers.buffered import Buffered
from consumers.cohort import Cohort
from consumers.decisions import CommitPoint, Decision, EmitEvent, EmitGroup
from consumers.enrichment import Enrichment, TeacherOf, TeacherRequest, no_teacher
from consumers.partition import Partition
from consumers.replay_buffer import FIRST_DELAY_S, Answer, ReplayBuffer, next_delay_s
from consumers.settlement import SettledSet
from consumers.turn import Counts, Now, Turn
from consumers.written import cohort_event, dead_letter, identity_of, record_event
from schemas.codec import encode_group
from schemas.errors import RecordUnreadable, RowRejected
from schemas.records import (
    AssembledGroup,
    AttemptFailed,
    CancelRequested,
    EventKind,
    ExecutionStarted,
    FailedBy,
    GroupEvent,
    Manifest,
    OfAttempt,
    RolloutRow,
    TeacherLogprobs,
)
from schemas.validation import check_row


class Assembler:
    def __init__(
        self, manifest: Manifest, budget_bytes: int, teacher_of: TeacherOf = no_teacher
    ) -> None:
        self.counts = Counts()
        self.buffered = Buffered(budget_bytes)
        self.enrichment = Enrichment(teacher_of)
        self.partitions: dict[int, Partition] = {}
        self._manifest = manifest
        self._admission = Admission(manifest)
        self._replay_buffer = ReplayBuffer(manifest.lead, manifest.max_trajectory_age_steps)

    def assign(self, number: int, position: int, settled: SettledSet, seen: int) -> None:
        """Partition `number`, as its last commit left it."""
        self.drop([number])
        partitions = self._manifest.num_partitions
        self.partitions[number] = Partition(number, partitions, settled, position, seen)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets these partitions; whoever is assigned them next begins at their commit."""
        for number in numbers:
            partition = self.partitions.pop(number, None)
            for cohort in partition.cohorts() if partition else ():
                self._forget(cohort)

    def receive(self, incoming: Incoming, now: Now) -> list[Decision]:
        """One record. Those of partitions that are not ours, or read before, decide nothing."""
        partition = self.partitions.get(incoming.partition)
        if partition is None or incoming.offset < partition.position:
            return []
        turn = Turn(now, was_committed=incoming.offset < partition.seen, offset=incoming.offset)
        try:
            record = self._admission.admit(incoming)
        except (RecordUnreadable, RowRejected) as error:
            self._dead_letter(turn, incoming, error.reason, str(error))
        else:
            self._apply(turn, partition, incoming, record)
        partition.position = incoming.offset + 1
        partition.has_changed = True
        self.buffered.keep_to_budget(self._live())
        return turn.decisions

    def announce(self, version: int, now: Now) -> list[Decision]:
        """A `policy` record: every held group is offered again, the first needed one first."""
        self._replay_buffer.announce(version)
        return self._offer_again(self.buffered.held.values(), now)

    def offer_held(self, now: Now) -> list[Decision]:
        """Offers the held groups whose backoff has passed."""
        held = self.buffered.held.values()
        return self._offer_again([c for c in held if c.offer_at_s <= now.monotonic_s], now)

    @property
    def next_offer_s(self) -> float | None:
        """Monotonic time of the next offer_held() that does anything."""
        return min((cohort.offer_at_s for cohort in self.buffered.held.values()), default=None)

    def payloads_wanted(self) -> list[tuple[int, int]]:
        """(partition, offset) of rows that were let go and are needed now, ascending."""
        return self.buffered.wanted(self._live())

    def restore(self, incoming: Incoming, now: Now) -> list[Decision]:
        """A payload of payloads_wanted(), read again. Raises OffsetsLost where it is another."""
        cohort = self.buffered.restore(incoming)
        if cohort is None:
            return []
        decisions = self._offer_again([cohort], now) if cohort.is_resident else []
        self.buffered.keep_to_budget(self._live())
        return decisions

    def teacher_request(self, teacher: str) -> TeacherRequest | None:
        """What that teacher, which has nothing to do, is asked next."""
        cohort = self.enrichment.next_of(teacher)
        if cohort is None:
            return None
        if not cohort.is_resident:
            self.buffered.unread[cohort.key] = cohort  # it is asked when they are read again
            return None
        return self.enrichment.ask(cohort, teacher)

    def teacher_answered(
        self, number: int, logprobs: list[TeacherLogprobs], now: Now
    ) -> list[Decision]:
        """The group is offered with what its teacher said of it."""
        cohort = self.enrichment.answered(number)
        if cohort is None:
            return []
        cohort.teacher_logprobs = logprobs
        return self._offer_again([cohort], now)

    def teacher_failed(self, number: int, message: str, now: Now) -> list[Decision]:
        """The attempt fails: its group would be trained without what its agent is to have."""
        cohort = self.enrichment.answered(number)
        if cohort is None:
            return []
        turn = Turn(now)
        self._fail(turn, cohort, "teacher_failed", "infra", message)
        return turn.decisions

    @property
    def has_changed(self) -> bool:
        """There is something to commit."""
        return any(partition.has_changed for partition in self.partitions.values())

    def commit_points(self) -> list[CommitPoint]:
        """Of every partition that changed since mark_committed()."""
        return [p.commit_point() for p in self.partitions.values() if p.has_changed]

    def mark_committed(self) -> None:
        for partition in self.partitions.values():
            partition.has_changed = False

    @property
    def groups_open(self) -> int:
        """Unsettled tasks that were heard of."""
        return sum(partition.open_tasks for partition in self.partitions.values())

    def _apply(
        self, turn: Turn, partition: Partition, incoming: Incoming, record: OfAttempt
    ) -> None:
        if isinstance(record, RolloutRow):
            self.counts.rows += 1
        if partition.is_settled(record.task_index):
            self._late(turn, partition, record, "the task is settled")
            return
        cohort = None
        try:
            self._admission.check_reach(record, partition.settled.watermark)
            if isinstance(record, CancelRequested):
                event = record_event(
                    record,
                    EventKind.ABANDONED,
                    turn.now.wall_ms,
                    incoming.offset,
                    reason=record.reason,
                )
                self._abandon(turn, partition, event)
                return
            cohort = partition.cohort_of(record, incoming.offset)
            self._join(turn, cohort, record, incoming)
        except RowRejected as error:
            self._dead_letter(turn, incoming, error.reason, str(error))
            if isinstance(record, RolloutRow):
                self.counts.rows_rejected += 1
            if cohort is not None:
                self._fail(turn, cohort, error.reason, "data", str(error), once=True)

    def _join(self, turn: Turn, cohort: Cohort, record: OfAttempt, incoming: Incoming) -> None:
        """Raises RowRejected for what must not be in the cohort, which then fails."""
        if cohort.failed:
            self._late(turn, self.partitions[cohort.partition], record, "the attempt had failed")
            return
        match record:
            case AttemptFailed():
                if record.by is FailedBy.SHARD or not cohort.is_complete:
                    reason, failure_class = record.reason, record.failure_class
                    self._fail(turn, cohort, reason, failure_class, record.message, once=True)
            case ExecutionStarted():
                cohort.check_same(record)
                self._start(turn, cohort, record)
            case RolloutRow():
                cohort.check_same(record)
                self._place(turn, cohort, record, incoming)

    def _start(self, turn: Turn, cohort: Cohort, record: ExecutionStarted) -> None:
        if cohort.started:
            turn.event_once(cohort.partition, record, EventKind.DUPLICATE)
            return
        cohort.started = True
        cohort.execution_id = record.execution_id
        cohort.shard, cohort.replica = record.shard, record.replica
        turn.event_once(cohort.partition, record, EventKind.STARTED)

    def _place(self, turn: Turn, cohort: Cohort, row: RolloutRow, incoming: Incoming) -> None:
        payload = incoming.value or b""
        if cohort.is_repeat(row, payload):
            self.counts.rows_duplicate += 1
            turn.event_once(cohort.partition, row, EventKind.DUPLICATE)
            return
        check_row(row)
        self._check_size(row, payload)
        cohort.place(row, incoming.offset, payload)
        self.buffered.keep(len(payload))
        self.counts.rows_placed += 1
        if cohort.encoded_rows_bytes > self._manifest.max_group_bytes:
            self._too_large(turn, cohort, cohort.encoded_rows_bytes)
        elif cohort.is_complete:
            self._offer(turn, cohort)

    def _check_size(self, row: RolloutRow, payload: bytes) -> None:
        if len(payload) > self._manifest.max_row_bytes:
            raise RowRejected(
                "row_too_large",
                f"task {row.task_index} attempt {row.attempt} row {row.row_index}: {len(payload)} "
                f"bytes, limit {self._manifest.max_row_bytes} (kafka.max_row_bytes)",
            )

    def _offer_again(self, cohorts: Iterable[Cohort], now: Now) -> list[Decision]:
        turn = Turn(now)
        in_order = sorted(
            cohorts, key=lambda c: (c.identity.target_step, c.task_index, c.last_offset)
        )
        for cohort in in_order:
            if not self.partitions[cohort.partition].is_settled(cohort.task_index):
                self._offer(turn, cohort)  # else a sibling attempt was accepted just before
        return turn.decisions

    def _offer(self, turn: Turn, cohort: Cohort) -> None:
        """Asks the replay buffer for a complete cohort, and does as it says.

        A group that lacks its teacher's answer gets it first, while it would have to wait anyway.
        """
        self.buffered.stop_waiting(cohort)
        identity = cohort.identity
        answer = self._replay_buffer.offer(
            identity.target_step, cohort.generation_version, identity.purpose
        )
        if answer is not Answer.STALE and self.enrichment.lacks(cohort):
            self.enrichment.wait(cohort)
        elif answer is Answer.FULL:
            cohort.delay_s = next_delay_s(cohort.delay_s) if cohort.delay_s else FIRST_DELAY_S
            cohort.offer_at_s = turn.now.monotonic_s + cohort.delay_s
            self.buffered.held[cohort.key] = cohort
        elif answer is Answer.STALE:
            bound = identity.target_step - self._manifest.max_trajectory_age_steps
            self._fail(
                turn,
                cohort,
                "stale",
                "infra",
                f"generated under version {cohort.generation_version}; target "
                f"{identity.target_step} takes {bound} and later",
            )
        elif not cohort.is_resident:
            self.buffered.unread[cohort.key] = cohort
        else:
            self._accept(turn, cohort)

    def _accept(self, turn: Turn, cohort: Cohort) -> None:
        header = AssembledGroup(
            **identity_of(cohort.identity),
            execution_id=cohort.execution_id or "",
            generation_version=cohort.generation_version,
            accepted_at_ms=turn.now.wall_ms,
            teacher_logprobs=cohort.teacher_logprobs or [],
            rows=[],
        )
        value = encode_group(header, cohort.payloads())
        if len(value) > self._manifest.max_group_bytes:
            self._too_large(turn, cohort, len(value))
            return
        self.counts.groups_accepted += 1
        turn.decisions += [
            EmitGroup(cohort.partition, cohort.task_index, value),
            EmitEvent(cohort.partition, cohort_event(cohort, EventKind.ACCEPTED, turn.now.wall_ms)),
        ]
        self._settle(self.partitions[cohort.partition], cohort.task_index)

    def _too_large(self, turn: Turn, cohort: Cohort, size_bytes: int) -> None:
        message = (
            f"{len(cohort.rows)} of {cohort.identity.group_size} rows have {size_bytes} bytes, "
            f"limit {self._manifest.max_group_bytes} (kafka.max_group_bytes)"
        )
        event = cohort_event(
            cohort, EventKind.ABANDONED, turn.now.wall_ms, reason="too_large", message=message
        )
        self._abandon(turn, self.partitions[cohort.partition], event)

    def _abandon(self, turn: Turn, partition: Partition, event: GroupEvent) -> None:
        self.counts.groups_abandoned += 1
        turn.decisions.append(EmitEvent(partition.number, event))
        self._settle(partition, event.task_index)

    def _fail(
        self,
        turn: Turn,
        cohort: Cohort,
        reason: str,
        failure_class: str,
        message: str,
        *,
        once: bool = False,
    ) -> None:
        """Its rows go, its first offset stays. `once`: a single record did it."""
        if not (once and turn.was_committed):
            event = cohort_event(
                cohort,
                EventKind.ATTEMPT_FAILED,
                turn.now.wall_ms,
                rows_offset=turn.offset if once else -1,
                reason=reason,
                failure_class=failure_class,
                message=message,
            )
            turn.decisions.append(EmitEvent(cohort.partition, event))
            self.counts.attempts_failed += 1
        self._forget(cohort)
        cohort.failed = True
        self.partitions[cohort.partition].has_changed = True

    def _settle(self, partition: Partition, task_index: int) -> None:
        for cohort in partition.settle(task_index):
            self._forget(cohort)
        partition.has_changed = True

    def _forget(self, cohort: Cohort) -> None:
        self.enrichment.forget(cohort)
        self.buffered.forget(cohort)

    def _late(self, turn: Turn, partition: Partition, record: OfAttempt, message: str) -> None:
        """A start or a request that comes late needs no answer; a row is counted and told."""
        if isinstance(record, RolloutRow):
            self.counts.rows_late += 1
            turn.event_once(partition.number, record, EventKind.LATE, message)

    def _dead_letter(self, turn: Turn, incoming: Incoming, reason: str, message: str) -> None:
        if not turn.was_committed:
            self.counts.dead_letters += 1
            limit = self._manifest.max_row_bytes
            turn.decisions.append(dead_letter(incoming, reason, message, limit))

    def _live(self) -> Iterator[Cohort]:
        for partition in self.partitions.values():
            yield from (cohort for cohort in partition.cohorts() if not cohort.failed)
