"""Assembler, settlement and replay buffer under any interleaving, crash, rebalance and hostility.

`Log` is Kafka in memory: appended records, and per partition the committed (offset, metadata).
Members read it, decide, and commit decisions and offsets in one step or lose both. The invariants
are checked against what is committed, since nothing else is ever seen by others.
HYPOTHESIS_PROFILE=nightly runs 10,000 examples.
"""

import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from consumers.admission import Incoming
from consumers.assembler import Assembler
from consumers.decisions import DeadLetter, Decision, EmitEvent, EmitGroup
from consumers.enrichment import TeacherRequest, logprobs_of
from consumers.memory import needed_first
from consumers.settlement import MAX_AHEAD, SettledSet
from consumers.turn import Now
from schemas.codec import decode_as, encode, row_payloads
from schemas.identity import initial_watermark, ordinal_of, partition_of
from schemas.records import AssembledGroup, EventKind, FailedBy, Record
from tests.rows import make_cancel, make_failed, make_manifest, make_row, make_started

PARTITIONS = 2
FIRST_TASK = 3
TASKS = 5
MANIFEST = make_manifest(
    num_partitions=PARTITIONS, num_generations_per_prompt=3, first_task_index=FIRST_TASK
)
ROW_BYTES = len(encode(make_row(MANIFEST, FIRST_TASK, 0, tokens=3)))
BUDGET_BYTES = 5 * (ROW_BYTES + 4)
EXAMPLES = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 300
TERMINAL = (EventKind.ACCEPTED, EventKind.ABANDONED)

tasks = st.integers(FIRST_TASK, FIRST_TASK + TASKS - 1)
attempts = st.integers(0, 1)
indices = st.integers(0, 2)
ages = st.sampled_from([0, 0, 0, 1, 1, 2])  # versions behind the target; 2 is stale
numbers = st.integers(0, PARTITIONS - 1)
members = st.integers(0, 2)


def target_of(task_index: int) -> int:
    return 2 + (task_index - FIRST_TASK) // 2


@dataclass
class Log:
    records: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    row_tasks: list[dict[int, int]] = field(  # offset -> task, of the run's own records
        default_factory=lambda: [{} for _ in range(PARTITIONS)]
    )
    commits: list[tuple[int, str] | None] = field(default_factory=lambda: [None] * PARTITIONS)
    decisions: list[tuple[int | None, Decision]] = field(default_factory=list)


class Member:
    """`teacher` answers each request with zeros, when a rule says so."""

    def __init__(self, log: Log, version: int, now: Now, teacher: str | None) -> None:
        self.log = log
        self.teacher = teacher
        self.assembler = Assembler(MANIFEST, BUDGET_BYTES, lambda _: teacher)
        self.assembler.announce(version, now)
        self.uncommitted: list[tuple[int | None, Decision]] = []
        self.asked: TeacherRequest | None = None

    def adopt(self, number: int) -> None:
        commit = self.log.commits[number]
        if commit is None:
            watermark = initial_watermark(number, PARTITIONS, FIRST_TASK)
            self.assembler.assign(number, 0, SettledSet(watermark), 0)
        else:
            settled, seen = SettledSet.decode(commit[1] + "\0")
            self.assembler.assign(number, commit[0], settled, seen)

    def read(self, number: int, count: int, now: Now) -> None:
        partition = self.assembler.partitions[number]
        for _ in range(count):
            offset = partition.position
            if offset >= len(self.log.records[number]):
                return
            incoming = Incoming(number, offset, b"key", self.log.records[number][offset])
            for decision in self.assembler.receive(incoming, now):
                self.uncommitted.append((offset, decision))

    def add(self, decisions: list[Decision]) -> None:
        self.uncommitted += [(None, decision) for decision in decisions]

    def reread(self, now: Now) -> None:
        for number, offset in self.assembler.payloads_wanted():
            incoming = Incoming(number, offset, b"key", self.log.records[number][offset])
            self.add(self.assembler.restore(incoming, now))

    def ask(self) -> None:
        if self.teacher is not None and self.asked is None:
            self.asked = self.assembler.teacher_request(self.teacher)

    def learn(self, now: Now, *, fails: bool) -> int | None:
        """The task whose teacher answered or failed."""
        asked, self.asked = self.asked, None
        if asked is None:
            return None
        if fails:
            self.add(self.assembler.teacher_failed(asked.number, "no answer", now))
        else:
            zeros = logprobs_of(asked, [bytes(len(s.token_ids)) for s in asked.sequences])
            self.add(self.assembler.teacher_answered(asked.number, zeros, now))
        return asked.task_index

    def flush(self) -> None:
        for point in self.assembler.commit_points():
            self.log.commits[point.partition] = point.offset, point.metadata
        self.assembler.mark_committed()
        self.log.decisions += self.uncommitted
        self.uncommitted = []


class Assembly(RuleBasedStateMachine):
    @initialize(reads_at_once=st.booleans(), teacher=st.sampled_from([None, "teacher"]))
    def begin(self, reads_at_once: bool, teacher: str | None) -> None:
        self.teacher = teacher
        self.reads_at_once = reads_at_once  # else only when a rule says so
        self.now_s = 0.0
        self.version = 0
        self.log = Log()
        self.members = [self.new_member() for _ in range(3)]
        self.owner = [0] * PARTITIONS
        self.tainted: set[int] = set()  # tasks that something was done to
        for number in range(PARTITIONS):
            self.members[0].adopt(number)

    @property
    def now(self) -> Now:
        return Now(int(self.now_s * 1000), self.now_s)

    def new_member(self) -> Member:
        return Member(self.log, self.version, self.now, self.teacher)

    def append(self, record: Record | bytes, number: int, task_index: int | None) -> None:
        value = encode(record) if isinstance(record, Record) else record
        if task_index is not None:
            self.log.row_tasks[number][len(self.log.records[number])] = task_index
        self.log.records[number].append(value)
        if self.reads_at_once:
            self.records_are_read(number, len(self.log.records[number]))

    def append_own(self, record: Record) -> None:
        self.append(record, partition_of(record.task_index, PARTITIONS), record.task_index)

    @rule(task=tasks, attempt=attempts, index=indices, age=ages)
    def row_arrives(self, task: int, attempt: int, index: int, age: int) -> None:
        self.append_own(self.valid_row(task, attempt, index, age))
        if age:  # another age later would be a conflicting repeat
            self.tainted.add(task)

    @rule(task=tasks, attempt=attempts, age=ages)
    def group_arrives(self, task: int, attempt: int, age: int) -> None:
        for index in (2, 0, 1):
            self.row_arrives(task, attempt, index, age)

    def valid_row(self, task: int, attempt: int, index: int, age: int) -> Record:
        target = target_of(task)
        return make_row(
            MANIFEST, task, index, attempt, target_step=target, tokens=3, version=target - age
        )

    @rule(number=numbers, at=st.integers(0, 200))
    def record_comes_again(self, number: int, at: int) -> None:
        records = self.log.records[number]
        if records:
            at %= len(records)
            self.append(records[at], number, self.log.row_tasks[number].get(at))

    @rule(task=tasks, attempt=attempts, index=indices)
    def conflicting_row_arrives(self, task: int, attempt: int, index: int) -> None:
        row = make_row(
            MANIFEST, task, index, attempt, target_step=target_of(task), tokens=3, agent="other"
        )
        self.append_own(row)
        self.tainted.add(task)

    @rule(task=tasks, attempt=attempts, index=st.sampled_from([0, 3, -1]))
    def invalid_row_arrives(self, task: int, attempt: int, index: int) -> None:
        reward = float("nan") if index == 0 else 0.0
        row = make_row(
            MANIFEST, task, index, attempt, target_step=target_of(task), tokens=3, reward=reward
        )
        self.append_own(row)
        self.tainted.add(task)

    @rule(task=tasks, number=numbers, kind=st.sampled_from(["stamp", "run", "bytes", "far"]))
    def foreign_record_arrives(self, task: int, number: int, kind: str) -> None:
        far = FIRST_TASK + PARTITIONS * (MAX_AHEAD + TASKS + 2)
        foreign = {
            "stamp": make_row(MANIFEST, task, 0, stamp=bytes(8)),
            "run": make_row(make_manifest("other"), task, 0),
            "bytes": b"no record",
            "far": make_row(MANIFEST, far - far % PARTITIONS + number, 0),
        }
        self.append(foreign[kind], number, None)

    @rule(task=tasks)
    def row_comes_on_another_partition(self, task: int) -> None:
        row = self.valid_row(task, 0, 0, 0)
        self.append(row, 1 - partition_of(task, PARTITIONS), None)

    @rule(task=tasks, attempt=attempts, execution=st.sampled_from([None, None, "second"]))
    def execution_starts(self, task: int, attempt: int, execution: str | None) -> None:
        changes = {} if execution is None else {"execution_id": execution}
        record = make_started(MANIFEST, task, attempt, target_step=target_of(task), **changes)
        self.append_own(record)
        if changes:
            self.tainted.add(task)

    @rule(task=tasks, attempt=attempts, by=st.sampled_from(FailedBy))
    def attempt_fails(self, task: int, attempt: int, by: FailedBy) -> None:
        self.append_own(make_failed(MANIFEST, task, attempt, by=by, target_step=target_of(task)))
        self.tainted.add(task)

    @rule(task=tasks, attempt=attempts)
    def task_is_cancelled(self, task: int, attempt: int) -> None:
        self.append_own(make_cancel(MANIFEST, task, attempt, target_step=target_of(task)))
        self.tainted.add(task)

    @rule(number=numbers, count=st.integers(1, 20))
    def records_are_read(self, number: int, count: int) -> None:
        self.members[self.owner[number]].read(number, count, self.now)

    @rule()
    def policy_steps(self) -> None:
        self.version += 1
        for member in self.members:
            member.add(member.assembler.announce(self.version, self.now))

    @rule(seconds=st.sampled_from([0.005, 0.05, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for member in self.members:
            member.add(member.assembler.offer_held(self.now))

    @rule()
    def payloads_are_read_again(self) -> None:
        for member in self.members:
            member.reread(self.now)

    @rule(number=numbers)
    def teacher_is_asked(self, number: int) -> None:
        self.members[self.owner[number]].ask()

    @rule(number=numbers, fails=st.sampled_from([False, False, True]))
    def teacher_answers(self, number: int, fails: bool) -> None:
        task = self.members[self.owner[number]].learn(self.now, fails=fails)
        if fails and task is not None:
            self.tainted.add(task)

    @rule(number=numbers)
    def flush(self, number: int) -> None:
        self.members[self.owner[number]].flush()

    @rule(number=numbers)
    def crash(self, number: int) -> None:
        """Or a void transaction: what was not committed never was."""
        self.restart(self.owner[number])

    @rule(number=numbers, count=st.integers(1, 20))
    def crash_and_begin_again(self, number: int, count: int) -> None:
        """The second reading is committed too, as far as it came."""
        self.restart(self.owner[number])
        self.records_are_read(number, count)
        self.flush(number)

    def restart(self, member: int) -> None:
        self.members[member] = self.new_member()
        for number in range(PARTITIONS):
            if self.owner[number] == member:
                self.members[member].adopt(number)

    @rule(number=numbers, to=members, commits=st.booleans())
    def partition_moves(self, number: int, to: int, commits: bool) -> None:
        """Revoked in order, or lost: then the loser's other partitions begin again as well."""
        giver = self.owner[number]
        self.owner[number] = to
        if commits:
            self.members[giver].flush()
            self.members[giver].assembler.drop([number])
        else:
            self.restart(giver)
        self.members[to].adopt(number)

    def teardown(self) -> None:
        """Everything is read in the end, and nothing that can be accepted stays behind."""
        if not hasattr(self, "members"):
            return
        self.version = 100
        waiting: set[int] = set()
        for number in range(PARTITIONS):
            self.records_are_read(number, len(self.log.records[number]))
        for member in self.members:
            member.add(member.assembler.announce(self.version, self.now))
            for _ in range(4 * TASKS):
                member.reread(self.now)
                member.ask()
                member.learn(self.now, fails=False)
            waiting |= self.waiting_for_room(member)
            member.flush()
        self.committed_is_consistent()
        accepted = {g.task_index for g in self.committed_groups()}
        for task in range(FIRST_TASK, FIRST_TASK + TASKS):
            if task not in self.tainted | waiting and self.has_complete_attempt(task):
                assert task in accepted

    def waiting_for_room(self, member: Member) -> set[int]:
        """Tasks whose payload was let go, while one that is needed before them fills the memory."""
        assembler = member.assembler
        waiting = [*assembler.buffered.waiting(), *assembler.enrichment.waiting()]
        cohorts = [c for p in assembler.partitions.values() for c in p.cohorts()]
        for cohort in waiting:
            first = needed_first(cohorts)
            assert first is not None
            assert first not in waiting
            assert first.rank < cohort.rank
        return {cohort.task_index for cohort in waiting}

    def has_complete_attempt(self, task: int) -> bool:
        sent = self.log.records[partition_of(task, PARTITIONS)]
        rows = [[encode(self.valid_row(task, a, i, 0)) for i in range(3)] for a in range(2)]
        return any(all(row in sent for row in attempt) for attempt in rows)

    def committed_groups(self) -> list[AssembledGroup]:
        emitted = [d for _, d in self.log.decisions if isinstance(d, EmitGroup)]
        return [decode_as(decision.value, AssembledGroup) for decision in emitted]

    def settled_of(self, number: int) -> SettledSet:
        commit = self.log.commits[number]
        if commit is None:
            return SettledSet(initial_watermark(number, PARTITIONS, FIRST_TASK))
        return SettledSet.decode(commit[1])[0]

    def is_settled(self, task: int) -> bool:
        return ordinal_of(task, PARTITIONS) in self.settled_of(partition_of(task, PARTITIONS))

    @invariant()
    def committed_is_consistent(self) -> None:
        if not hasattr(self, "log"):
            return
        groups = self.committed_groups()
        for group in groups:
            sent = self.log.records[partition_of(group.task_index, PARTITIONS)]
            assert [row.row_index for row in group.rows] == [0, 1, 2]
            assert {row.cohort for row in group.rows} == {group.cohort}
            assert {row.execution_id for row in group.rows} == {group.execution_id}
            taught = [answer.row_index for answer in group.teacher_logprobs]
            assert taught == ([0, 1, 2] if self.teacher else [])
            assert all(payload in sent for payload in row_payloads(group))
        events = [d.event for _, d in self.log.decisions if isinstance(d, EmitEvent)]
        terminal = [event.task_index for event in events if event.kind in TERMINAL]
        accepted = [event.task_index for event in events if event.kind is EventKind.ACCEPTED]
        assert sorted(accepted) == sorted(group.task_index for group in groups)
        assert len(terminal) == len(set(terminal)), "a task ended twice"
        settled = [t for t in range(FIRST_TASK, FIRST_TASK + TASKS) if self.is_settled(t)]
        assert sorted(terminal) == settled

    @invariant()
    def single_records_are_told_once(self) -> None:
        if not hasattr(self, "log"):
            return
        letters = [d for _, d in self.log.decisions if isinstance(d, DeadLetter)]
        origins = [(letter.partition, letter.offset) for letter in letters]
        assert len(origins) == len(set(origins))
        told = [
            (d.partition, offset, d.event.kind)
            for offset, d in self.log.decisions
            if isinstance(d, EmitEvent)
            and d.event.kind not in TERMINAL
            and d.event.reason not in ("stale", "teacher_failed")
        ]
        assert len(told) == len(set(told))

    @invariant()
    def no_commit_is_above_an_unsettled_row(self) -> None:
        if not hasattr(self, "log"):
            return
        for number, commit in enumerate(self.log.commits):
            if commit is None:
                continue
            offset, metadata = commit
            assert len(metadata) <= 4000
            settled, seen = SettledSet.decode(metadata)
            assert offset <= seen <= len(self.log.records[number])
            for at, task in self.log.row_tasks[number].items():
                if at < offset:
                    assert ordinal_of(task, PARTITIONS) in settled

    @invariant()
    def memory_is_within_budget_and_sums_close(self) -> None:
        for member in getattr(self, "members", []):
            assembler, counts = member.assembler, member.assembler.counts
            cohorts = [c for p in assembler.partitions.values() for c in p.cohorts()]
            resident = {c.key: c.resident_bytes for c in cohorts if c.resident_bytes}
            assert assembler.buffered.used_bytes == sum(resident.values())
            for cohort in cohorts:
                payloads = [row.payload for row in cohort.rows.values()]
                assert cohort.resident_bytes == sum(len(p) for p in payloads if p is not None)
            if assembler.buffered.used_bytes > BUDGET_BYTES:
                first = needed_first(cohorts)
                assert first is not None
                assert set(resident) == {first.key}
            assert counts.rows == (
                counts.rows_placed + counts.rows_late + counts.rows_duplicate + counts.rows_rejected
            )


TestAssembly = Assembly.TestCase
TestAssembly.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
