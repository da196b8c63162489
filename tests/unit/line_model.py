"""Dispatcher, shards, assembler, teacher, trainer around a Kafka in memory: no clock, no network.

Each part keeps what its real process keeps: the dispatcher its ledger, the assembler its commits,
the trainer what it trained. A crash of one loses what it had not committed.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

from consumers.admission import Incoming
from consumers.assembler import Assembler
from consumers.decisions import Decision, EmitEvent, EmitGroup
from consumers.enrichment import TeacherRequest, logprobs_of
from consumers.settlement import SettledSet
from consumers.turn import Now
from producers.decisions import DeclareLastTarget, DeclareTargetSize, RequestCancel, SendPrompt
from producers.planning import Planner, Rules
from producers.routing import Router
from schemas.codec import decode_as, encode
from schemas.identity import partition_of
from schemas.records import (
    AssembledGroup,
    EventKind,
    FailedBy,
    GroupEvent,
    LedgerTask,
    Manifest,
    Record,
)
from tests.rows import make_cancel, make_failed, make_manifest, make_row, make_rows
from tests.unit.test_ledger import Topic

N, G, P, AGE = 2, 4, 2, 1
TEACHER = "teacher"
ROUTER = Router({"sums": "one"}, {"one": 1})


class Prompts:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def agent_of(self, epoch: int, position: int) -> str:
        return "sums"


@dataclass
class Kafka:
    """Only what is committed."""

    rows: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(P)])
    events: list[GroupEvent] = field(default_factory=list)
    groups: list[AssembledGroup] = field(default_factory=list)
    dispatch: Topic = field(default_factory=Topic)
    dispatcher_offset: int = 0  # in `events`
    commits: list[tuple[int, str] | None] = field(default_factory=lambda: [None] * P)
    prompts: dict[tuple[int, int], LedgerTask] = field(default_factory=dict)
    version: int = 0
    last_target: int | None = None
    sizes: dict[int, int] = field(default_factory=dict)

    def append(self, record: Record | bytes, task_index: int) -> None:
        value = encode(record) if isinstance(record, Record) else record
        self.rows[partition_of(task_index, P)].append(value)


class Line:
    def __init__(self, prompts: int, max_failures: int = 1_000, *, taught: bool) -> None:
        self.kafka = Kafka()
        self.manifest: Manifest = make_manifest(
            num_partitions=P, num_prompts_per_step=N, lead=AGE, max_trajectory_age_steps=AGE
        )
        self.rules = Rules(0, 0, P, N, G, AGE, AGE, 2, max_failures, 1, 1_000)
        self.catalog = Prompts(prompts)
        self.taught = taught
        self.now_s = 0.0
        self.unsent: dict[tuple[int, int], set[int]] = {}  # rows by attempt, of running ones
        self.dispatcher_restarts()
        self.assembler_restarts()

    @property
    def now(self) -> Now:
        return Now(int(1000 * self.now_s), self.now_s)

    # The dispatcher: reads events, decides, writes ledger, prompts and offset in one step.

    def dispatcher_restarts(self) -> None:
        ledger = self.kafka.dispatch.fold()
        self.planner = Planner(self.rules, ledger, ROUTER, self.catalog, self.now_s)

    def dispatcher_turns(self, *, dies: str = "") -> None:
        """`dies`: "before" or "after" its commit; then its requests are not sent."""
        kafka, planner = self.kafka, self.planner
        read = kafka.events[kafka.dispatcher_offset :]
        planner.on_version(kafka.version)
        for event in read:
            planner.on_event(event, self.now_s)
        written = planner.plan(self.now_s, 1)
        planner.ledger.require_sums()
        if dies == "before":
            self.dispatcher_restarts()
            return
        kafka.dispatch.write(planner.ledger)
        kafka.dispatcher_offset += len(read)
        for decision in written:
            match decision:
                case SendPrompt(task):
                    assert (task.task_index, task.attempt) not in kafka.prompts
                    kafka.prompts[task.task_index, task.attempt] = task
                    self.unsent[task.task_index, task.attempt] = set(range(G))
                case DeclareLastTarget(target):
                    kafka.last_target = target
                case DeclareTargetSize(target, groups):
                    kafka.sizes[target] = groups
        if dies == "after":
            self.dispatcher_restarts()
            return
        for cancel in planner.take_cancels():
            self._cancel(cancel)

    def _cancel(self, cancel: RequestCancel) -> None:
        task = cancel.task
        record = make_cancel(
            self.manifest, task.task_index, task.attempt, target_step=task.target_step
        )
        self.kafka.append(record, task.task_index)

    # A shard.

    def row_is_done(self, choice: random.Random) -> None:
        if self.unsent:
            key = choice.choice(sorted(self.unsent))
            self.send_row(key, choice.choice(sorted(self.unsent[key])))

    def send_row(self, key: tuple[int, int], index: int) -> None:
        task = self.kafka.prompts[key]
        if self.kafka.version < task.min_version:
            return  # the prompt waits for its policy
        row = make_row(
            self.manifest, *(key[0], index, key[1]), target_step=task.target_step, tokens=3,
            version=task.min_version,
        )  # fmt: skip
        self.kafka.append(row, key[0])
        self.unsent[key].discard(index)
        if not self.unsent[key]:
            del self.unsent[key]

    def attempt_fails(self, choice: random.Random, by: FailedBy) -> None:
        """By the shard it also ends; by the dispatcher it may go on regardless."""
        if not self.unsent:
            return
        key = choice.choice(sorted(self.unsent))
        task = self.kafka.prompts[key]
        if by is FailedBy.SHARD:
            del self.unsent[key]
        record = make_failed(self.manifest, *key, by=by, target_step=task.target_step)
        self.kafka.append(record, key[0])

    # The assembler and its teacher.

    def assembler_restarts(self) -> None:
        teacher = TEACHER if self.taught else None
        self.assembler = Assembler(self.manifest, 1 << 30, lambda _: teacher)
        self.assembler.announce(self.kafka.version, self.now)
        self.uncommitted: list[Decision] = []
        self.asked: TeacherRequest | None = None
        for number, commit in enumerate(self.kafka.commits):
            offset, metadata = commit or (0, SettledSet().encode(0))
            settled, seen = SettledSet.decode(metadata)
            self.assembler.assign(number, offset, settled, seen)

    def assembler_reads(self, number: int, count: int) -> None:
        position = self.assembler.partitions[number].position
        for offset in range(position, min(position + count, len(self.kafka.rows[number]))):
            incoming = Incoming(number, offset, b"k", self.kafka.rows[number][offset])
            self.uncommitted += self.assembler.receive(incoming, self.now)

    def assembler_turns(self) -> None:
        """Follows the policy, asks its teacher, offers what it holds."""
        self.uncommitted += self.assembler.announce(self.kafka.version, self.now)
        self.uncommitted += self.assembler.offer_held(self.now)
        if self.taught and self.asked is None:
            self.asked = self.assembler.teacher_request(TEACHER)

    def teacher_is_done(self, *, fails: bool) -> None:
        asked, self.asked = self.asked, None
        if asked is None:
            return
        if fails:
            self.uncommitted += self.assembler.teacher_failed(asked.number, "no", self.now)
            return
        zeros = logprobs_of(asked, [bytes(len(s.token_ids)) for s in asked.sequences])
        self.uncommitted += self.assembler.teacher_answered(asked.number, zeros, self.now)

    def assembler_flushes(self) -> None:
        kafka = self.kafka
        for point in self.assembler.commit_points():
            kafka.commits[point.partition] = point.offset, point.metadata
        self.assembler.mark_committed()
        for decision in self.uncommitted:
            match decision:
                case EmitGroup(_, _, value):
                    kafka.groups.append(decode_as(value, AssembledGroup))
                case EmitEvent(_, event):
                    kafka.events.append(event)
        self.uncommitted = []

    # The trainer.

    def trainer_turns(self) -> None:
        step = self.kafka.version
        if self.kafka.last_target is not None and step > self.kafka.last_target:
            return
        size = self.kafka.sizes.get(step, N)
        if sum(group.target_step == step for group in self.kafka.groups) == size:
            self.kafka.version += 1

    def drain(self) -> None:
        """Nothing fails any more, until the data has ended; AssertionError if it never does."""
        chance = random.Random(0)
        for _ in range(2_000):
            kafka = self.kafka
            if kafka.last_target is not None and kafka.version > kafka.last_target:
                self.dispatcher_turns()  # which may still have events to read
                return
            self.now_s += 1.0
            for _ in range(4 * N * G):
                self.row_is_done(chance)
            for number in range(P):
                self.assembler_reads(number, 1_000)
            for _ in range(2 * N):
                self.assembler_turns()
                self.teacher_is_done(fails=False)
            self.assembler_flushes()
            self.dispatcher_turns()
            self.trainer_turns()
        raise AssertionError(
            f"stands at version {self.kafka.version}: {self.planner.ledger.tasks}, {self.unsent}"
        )

    def check(self) -> None:
        kafka = self.kafka
        terminal = [e for e in kafka.events if e.kind in (EventKind.ACCEPTED, EventKind.ABANDONED)]
        ended = [event.task_index for event in terminal]
        assert len(ended) == len(set(ended)), "a task ended twice"
        accepted = sorted(e.task_index for e in terminal if e.kind is EventKind.ACCEPTED)
        assert accepted == sorted(group.task_index for group in kafka.groups)
        in_target: dict[int, int] = defaultdict(int)
        for group in kafka.groups:
            in_target[group.target_step] += 1
            assert [row.row_index for row in group.rows] == list(range(G))
            assert {row.cohort for row in group.rows} == {group.cohort}
            rows = make_rows(
                self.manifest, *group.cohort, target_step=group.target_step, tokens=3,
                version=group.generation_version,
            )  # fmt: skip
            assert [encode(row) for row in group.rows] == rows
            assert len(group.teacher_logprobs) == (G if self.taught else 0)
        assert all(count <= N for count in in_target.values())
        for target in range(kafka.version):
            assert in_target[target] == kafka.sizes.get(target, N)
        self._check_slots(set(ended))

    def _check_slots(self, ended: set[int]) -> None:
        """A slot's next task is dispatched after the one before it was abandoned."""
        slots: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (task_index, attempt), task in self.kafka.prompts.items():
            if attempt == 0:
                slots[task.target_step, task.rowidx_start].append(task_index)
        for tasks in slots.values():
            assert set(sorted(tasks)[:-1]) <= ended
