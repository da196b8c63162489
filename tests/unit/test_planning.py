"""What the dispatcher decides, one rule at a time, then all of them under random worlds."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from producers.decisions import (
    DeclareFatal,
    DeclareLastTarget,
    DeclareTargetSize,
    RequestCancel,
    SendPrompt,
    Written,
)
from producers.planning import ORDINAL_WINDOW, Planner, Rules, backoff_s
from producers.routing import Router
from schemas.records import EventKind, GroupEvent, LedgerTask, TaskState
from tests.rows import make_identity, make_manifest
from tests.unit.test_ledger import Topic

RULES = Rules(
    first_step=0,
    first_task_index=0,
    num_partitions=2,
    slots=2,
    group_size=4,
    lead=1,
    max_age=1,
    max_attempts=4,
    max_failures=0,
    max_epochs=1,
    max_steps=1_000_000,
)
MANIFEST = make_manifest()


class Prompts:
    """A catalog of `count` prompts; agents `a` and `b` alternate."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def agent_of(self, epoch: int, position: int) -> str:
        return "ab"[(epoch + position) % 2]


ROUTER = Router({"a": "one", "b": "two"}, {"one": 2, "two": 1})


def event_of(kind: EventKind, task_index: int, attempt: int = 0, **changes: Any) -> GroupEvent:
    fields = make_identity(MANIFEST, task_index, attempt) | {"kind": kind, "at_ms": 1}
    return GroupEvent(**fields | changes)


class Run:
    """A planner with a clock, driven step by step."""

    def __init__(self, rules: Rules = RULES, prompts: int = 100) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.topic = Topic()
        self.prompts = Prompts(prompts)
        self.planner = self.restarted()

    def restarted(self) -> Planner:
        ledger = self.topic.fold(self.rules.first_task_index)
        self.planner = Planner(self.rules, ledger, ROUTER, self.prompts, self.now_s)
        return self.planner

    def plan(self, version: int | None = None, *events: GroupEvent) -> list[Written]:
        if version is not None:
            self.planner.on_version(version)
        for event in events:
            self.planner.on_event(event, self.now_s)
        written = self.planner.plan(self.now_s, 1)
        self.planner.ledger.require_sums()
        self.topic.write(self.planner.ledger)
        return written

    def sent(self, version: int | None = None, *events: GroupEvent) -> list[LedgerTask]:
        written = self.plan(version, *events)
        return [decision.task for decision in written if isinstance(decision, SendPrompt)]

    def fail(self, attempt: int, reason: str = "gym_error") -> GroupEvent:
        return event_of(EventKind.ATTEMPT_FAILED, 0, attempt, reason=reason)

    @property
    def task(self) -> LedgerTask:
        return self.planner.ledger.tasks[0]


def test_nothing_is_sent_before_the_first_version():
    assert Run().plan() == []


def test_every_slot_of_the_window_gets_a_task():
    run = Run()
    tasks = run.sent(0)
    assert [(t.task_index, t.target_step, t.rowidx_start) for t in tasks] == [
        (0, 0, 0), (1, 0, 4), (2, 1, 0), (3, 1, 4),
    ]  # fmt: skip
    assert run.sent() == []
    assert [t.target_step for t in run.sent(1)] == [2, 2]


def test_prompts_follow_the_order_of_the_data_and_carry_their_route():
    tasks = Run().sent(0)
    assert [(t.epoch, t.position, t.agent) for t in tasks] == [
        (0, 0, "a"), (0, 1, "b"), (0, 2, "a"), (0, 3, "b"),
    ]  # fmt: skip
    assert [(t.shard, t.replica, t.partition, t.seq) for t in tasks] == [
        ("one", 0, 0, 0), ("two", 0, 0, 0), ("one", 1, 4, 0), ("two", 0, 1, 0),
    ]  # fmt: skip


def test_min_version_is_the_bound_of_the_age_and_not_below_the_first_version():
    run = Run(replace(RULES, first_step=5, lead=2, max_age=1))
    assert [t.min_version for t in run.sent(5)] == [5, 5, 5, 5, 6, 6]


def test_synchronous_runs_stay_on_policy():
    run = Run(replace(RULES, lead=0, max_age=0))
    assert {(t.target_step, t.min_version) for t in run.sent(0)} == {(0, 0)}
    assert {(t.target_step, t.min_version) for t in run.sent(1)} == {(1, 1)}


def test_sequence_numbers_are_dense_in_each_partition():
    run = Run()
    seqs: dict[tuple[str, int], list[int]] = {}
    for version in range(20):
        for task in run.sent(version):
            seqs.setdefault((task.shard, task.partition), []).append(task.seq)
    assert all(numbers == list(range(len(numbers))) for numbers in seqs.values())


def test_an_attempt_is_repeated_after_1_2_and_4_seconds_then_given_up():
    run = Run()
    run.sent(0)
    for attempt, wait_s in enumerate((1, 2, 4)):
        assert run.sent(0, run.fail(attempt)) == []
        assert run.planner.next_due_s == run.now_s + wait_s
        run.now_s += wait_s - 0.01
        assert run.sent() == []
        run.now_s += 0.01
        (again,) = run.sent()
        assert (again.task_index, again.attempt, again.state) == (0, attempt + 1, "dispatched")
    assert run.sent(0, run.fail(3, "deadline")) == []
    (cancel,) = run.planner.take_cancels()
    assert cancel == RequestCancel(run.task)
    assert (run.task.state, run.task.reason) == (TaskState.CANCELLING, "deadline")
    assert run.planner.take_cancels() == []


def test_backoff_has_an_upper_end():
    assert [backoff_s(n) for n in (1, 2, 3, 20)] == [1, 2, 4, 60]


def test_a_repeated_attempt_goes_to_another_replica_with_the_next_sequence_number():
    run = Run()
    first = run.sent(0)[0]
    run.plan(0, run.fail(0))
    run.now_s += 1
    (again,) = run.sent()
    assert (first.replica, again.replica) == (0, 1)
    assert again.rowidx_start == first.rowidx_start


def test_the_attempt_after_a_lost_shard_runs_alone():
    run = Run()
    run.sent(0)
    run.plan(0, run.fail(0, "shard_lost"))
    run.now_s += 1
    assert run.sent()[0].alone
    run.plan(0, run.fail(1))
    run.now_s += 2
    assert not run.sent()[0].alone


def test_stale_groups_are_sent_again_at_once_and_the_third_in_a_row_is_a_failure():
    run = Run()
    run.sent(0)
    assert [t.attempt for t in run.sent(0, run.fail(0, "stale"))] == [1]
    assert [t.attempt for t in run.sent(0, run.fail(1, "stale"))] == [2]
    assert run.task.failures == 0
    assert run.sent(0, run.fail(2, "stale")) == []
    assert run.task.failures == 1
    run.now_s += 1
    assert [t.attempt for t in run.sent()] == [3]


def test_another_failure_ends_a_row_of_stale_ones():
    run = Run()
    run.sent(0)
    run.sent(0, run.fail(0, "stale"))
    run.sent(0, run.fail(1, "stale"))
    run.sent(0, run.fail(2))
    run.now_s += 1
    run.sent()
    assert [t.attempt for t in run.sent(0, run.fail(3, "stale"))] == [4]


def test_events_of_attempts_that_are_not_out_change_nothing():
    run = Run()
    run.sent(0)
    run.plan(0, run.fail(0))
    waiting = run.task
    run.plan(0, run.fail(0), run.fail(1))
    assert run.task == waiting
    run.now_s += 1
    run.sent()
    current = run.task
    run.plan(0, run.fail(0))
    assert run.task == current


def test_an_earlier_attempt_may_still_be_accepted():
    run = Run()
    run.sent(0)
    run.plan(0, run.fail(0))
    run.plan(0, event_of(EventKind.ACCEPTED, 0, 0))
    run.now_s += 60
    assert run.sent() == []
    assert run.planner.ledger.totals.accepted == 1


def test_an_abandoned_task_leaves_its_slot_to_a_fresh_prompt():
    run = Run(replace(RULES, max_failures=1))
    run.sent(0)
    (fresh,) = run.sent(0, event_of(EventKind.ABANDONED, 1, reason="too_large"))
    assert (fresh.task_index, fresh.target_step, fresh.rowidx_start, fresh.position) == (4, 0, 4, 4)
    assert run.planner.ledger.totals.abandoned == {"too_large": 1}


def test_a_slot_waits_for_the_answer_to_its_cancel():
    run = Run(replace(RULES, max_attempts=1, max_failures=1))
    run.sent(0)
    assert run.sent(0, run.fail(0)) == []
    (fresh,) = run.sent(0, event_of(EventKind.ABANDONED, 0))
    assert fresh.task_index == 4
    assert run.planner.ledger.totals.abandoned == {"gym_error": 1}


def test_events_of_ended_tasks_change_nothing():
    run = Run()
    run.sent(0)
    run.plan(0, event_of(EventKind.ACCEPTED, 0))
    totals = run.planner.ledger.totals
    run.plan(0, event_of(EventKind.ACCEPTED, 0), event_of(EventKind.ABANDONED, 0))
    assert run.planner.ledger.totals == totals


@pytest.mark.parametrize("allowed", [0, 2])
def test_too_many_abandoned_in_a_row_are_fatal(allowed):
    run = Run(replace(RULES, max_failures=allowed))
    tasks = run.sent(0)
    for task in tasks[:allowed]:
        event = event_of(EventKind.ABANDONED, task.task_index, reason="deadline")
        assert len(run.sent(0, event)) == 1
    last = event_of(EventKind.ABANDONED, tasks[allowed].task_index, reason="gym_error", message="!")
    (fatal,) = run.plan(0, last)
    assert isinstance(fatal, DeclareFatal)
    for text in (f"task {allowed} ", "(gym_error)", ": !.", f"{allowed + 1} in a row",
                 f"max_generation_failures allows {allowed}", "groupstream resume"):  # fmt: skip
        assert text in fatal.message
    assert run.plan(0) == []
    run.restarted()
    assert len(run.sent(0)) == 1, "a resumed run goes on"


def test_an_accepted_group_ends_a_row_of_failures():
    run = Run(replace(RULES, max_failures=1))
    run.sent(0)
    written = run.plan(
        0,
        event_of(EventKind.ABANDONED, 0),
        event_of(EventKind.ACCEPTED, 1),
        event_of(EventKind.ABANDONED, 2),
    )
    assert not any(isinstance(decision, DeclareFatal) for decision in written)


def test_the_data_ends_within_a_target():
    run = Run(prompts=3)
    written = run.plan(0)
    assert written[3:] == [DeclareLastTarget(1), DeclareTargetSize(1, 1)]
    assert run.plan(1) == []


def test_the_data_ends_with_a_full_target():
    run = Run(prompts=4)
    assert run.plan(0)[4:] == [DeclareLastTarget(1)]
    assert run.plan(1) == []


def test_epochs_follow_one_another_without_a_gap():
    run = Run(replace(RULES, max_epochs=2), prompts=3)
    assert [(t.epoch, t.position) for t in run.sent(0)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    written = run.plan(1)
    assert [(d.task.epoch, d.task.position) for d in written[:2]] == [(1, 1), (1, 2)]
    assert written[2:] == [DeclareLastTarget(2)]


def test_an_abandoned_task_without_a_replacement_makes_its_target_smaller():
    run = Run(replace(RULES, max_failures=9), prompts=3)
    run.plan(0)
    assert run.plan(0, event_of(EventKind.ABANDONED, 0)) == [DeclareTargetSize(0, 1)]
    run.restarted()
    assert run.plan(0) == []
    both = event_of(EventKind.ABANDONED, 1), event_of(EventKind.ABANDONED, 2)
    assert run.plan(0, *both) == [DeclareTargetSize(0, 0), DeclareTargetSize(1, 0)]


def test_steps_end_the_run():
    run = Run(replace(RULES, max_steps=2, max_failures=9))
    assert run.plan(0)[4:] == [DeclareLastTarget(1)]
    (fresh,) = run.plan(1, event_of(EventKind.ABANDONED, 3))
    assert isinstance(fresh, SendPrompt), "prompts are left, so the slot is filled again"
    assert run.sent(2) == []


def test_a_run_without_steps_has_no_target():
    run = Run(replace(RULES, first_step=7, max_steps=7))
    assert run.plan(7) == [DeclareLastTarget(6)]


def test_a_run_that_was_shortened_while_it_was_down_ends_where_it_is():
    run = Run(replace(RULES, lead=0))
    for version in range(3):
        tasks = run.sent(version)
        run.plan(version, *(event_of(EventKind.ACCEPTED, t.task_index) for t in tasks))
    run.rules = replace(RULES, lead=0, max_steps=1)
    run.restarted()
    assert run.plan(3) == [DeclareLastTarget(2)]


def test_no_task_is_too_far_above_the_lowest_outstanding_one_of_its_partition():
    rules = replace(RULES, slots=ORDINAL_WINDOW * 2 + 2, lead=0)
    run = Run(rules, prompts=10**6)
    tasks = run.sent(0)
    ordinals = [task.task_index // rules.num_partitions for task in tasks]
    assert max(ordinals) == ORDINAL_WINDOW
    assert run.sent(0, event_of(EventKind.ACCEPTED, 1)) == [], "task 0 still holds the next"
    run.planner.on_event(event_of(EventKind.ACCEPTED, 0), 0.0)
    assert run.planner.ledger.totals.next_task_index == len(tasks)


def test_a_restart_asks_again_for_cancels_and_waits_again_for_backoffs():
    run = Run(replace(RULES, max_attempts=2))
    run.sent(0)
    second = event_of(EventKind.ATTEMPT_FAILED, 1, 0, reason="deadline")
    run.plan(0, run.fail(0), second)
    run.now_s += 1
    run.sent()
    run.plan(0, run.fail(1))
    run.planner.take_cancels()
    run.plan(0, event_of(EventKind.ATTEMPT_FAILED, 2, 0, reason="deadline"))
    run.restarted()
    assert [c.task.task_index for c in run.planner.take_cancels()] == [0]
    assert run.sent(0) == []
    run.now_s += 1
    assert [(t.task_index, t.attempt) for t in run.sent(0)] == [(2, 1)]


CRASHES = st.sampled_from(["", "before the commit", "before the requests"])


class World(RuleBasedStateMachine):
    """An assembler and a trainer that follow the rules of theirs, and a dispatcher that crashes.

    `log` is the events topic; `committed` its offset in the dispatcher's last transaction, as
    `topic` is its ledger. Prompts and declarations count only when they were committed.
    """

    @initialize(
        slots=st.integers(1, 3),
        lead=st.integers(0, 2),
        prompts=st.integers(1, 9),
        epochs=st.integers(1, 2),
        steps=st.sampled_from([2, 5, 1_000]),
        first=st.sampled_from([0, 3]),
        attempts=st.integers(1, 2),
    )
    def begin(self, *, slots, lead, prompts, epochs, steps, first, attempts):
        rules = replace(
            RULES, slots=slots, lead=lead, max_age=lead, max_attempts=attempts, max_failures=10**6,
            max_epochs=epochs, max_steps=steps, first_step=first, first_task_index=first * 5,
        )  # fmt: skip
        self.run = Run(rules, prompts)
        self.rules = rules
        self.version = first
        self.log: list[GroupEvent] = []
        self.committed = 0
        self.sent: list[LedgerTask] = []
        self.newest: dict[int, LedgerTask] = {}
        self.ended: dict[int, EventKind] = {}
        self.failed: set[tuple[int, int]] = set()
        self.cancels: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.last: int | None = None
        self.step(deliver=0)

    def step(self, deliver: int, crash: str = "") -> None:
        planner = self.run.planner
        planner.on_version(self.version)
        taken = self.log[self.committed : self.committed + deliver]
        for event in taken:
            planner.on_event(event, self.run.now_s)
        written = planner.plan(self.run.now_s, 1)
        planner.ledger.require_sums()
        if crash == "before the commit":
            self.run.restarted()
            return
        self.run.topic.write(planner.ledger)
        self.committed += len(taken)
        for decision in written:
            match decision:
                case SendPrompt(task):
                    self.sent.append(task)
                    self.newest[task.task_index] = task
                case DeclareTargetSize(target, groups):
                    assert target >= self.version
                    self.sizes[target] = groups
                case DeclareLastTarget(target):
                    assert self.last is None
                    self.last = target
        if crash == "before the requests":
            self.run.restarted()
            return
        self.cancels |= {cancel.task.task_index for cancel in planner.take_cancels()}

    def alive(self) -> list[int]:
        return sorted(self.newest.keys() - self.ended.keys())

    def end(self, task_index: int, kind: EventKind) -> None:
        self.ended[task_index] = kind
        task = self.newest[task_index]
        self.log.append(event_of(kind, task_index, task.attempt, reason="r"))

    @precondition(lambda self: self.alive())
    @rule(pick=st.integers(0), kind=st.sampled_from([EventKind.ACCEPTED, EventKind.ABANDONED]))
    def settle(self, pick, kind):
        """Accepted, or abandoned by the assembler itself."""
        alive = self.alive()
        self.end(alive[pick % len(alive)], kind)

    @precondition(lambda self: self.alive())
    @rule(pick=st.integers(0), back=st.integers(0, 1), reason=st.sampled_from(["stale", "error"]))
    def fail(self, pick, back, reason):
        """The current attempt fails, or one that was current before."""
        alive = self.alive()
        task = self.newest[alive[pick % len(alive)]]
        attempt = max(0, task.attempt - back)
        self.failed.add((task.task_index, attempt))
        self.log.append(event_of(EventKind.ATTEMPT_FAILED, task.task_index, attempt, reason=reason))

    @precondition(lambda self: self.cancels)
    @rule()
    def answer(self):
        """Requests reach the assembler, which answers those that it had not accepted."""
        for task_index in sorted(self.cancels - self.ended.keys()):
            self.end(task_index, EventKind.ABANDONED)
        self.cancels.clear()

    @precondition(lambda self: self.committed < len(self.log))
    @rule(deliver=st.integers(1, 5), crash=CRASHES)
    def read_events(self, deliver, crash):
        self.step(deliver, crash)

    @rule(seconds=st.integers(1, 5), crash=CRASHES)
    def wait(self, seconds, crash):
        self.run.now_s += seconds
        self.step(0, crash)

    @rule()
    def restart(self):
        self.run.restarted()

    @rule()
    def train(self):
        """A step, if its groups are there."""
        if self.last is not None and self.version > self.last:
            return
        groups = self.sizes.get(self.version, self.rules.slots)
        there = [
            index
            for index, kind in self.ended.items()
            if kind is EventKind.ACCEPTED and self.newest[index].target_step == self.version
        ]
        assert len(there) <= groups
        if len(there) == groups:
            self.version += 1

    @invariant()
    def every_attempt_is_sent_once_and_tasks_are_dense(self):
        cohorts = Counter((task.task_index, task.attempt) for task in self.sent)
        assert set(cohorts.values()) <= {1}
        first = self.rules.first_task_index
        assert sorted(self.newest) == list(range(first, first + len(self.newest)))
        places = Counter((task.shard, task.partition, task.seq) for task in self.sent)
        assert set(places.values()) <= {1}
        for shard, partition, seq in places:
            assert seq == 0 or (shard, partition, seq - 1) in places
        prompts = Counter((t.epoch, t.position) for t in self.newest.values())
        assert set(prompts.values()) <= {1}

    @invariant()
    def no_slot_has_two_tasks(self):
        held = Counter(
            (self.newest[index].target_step, self.newest[index].rowidx_start)
            for index in self.newest
            if self.ended.get(index) is not EventKind.ABANDONED
        )
        assert set(held.values()) <= {1}
        assert all(row < self.rules.slots * self.rules.group_size for _, row in held)

    def teardown(self):
        """Everything now goes well: the run must end, with every prompt in its place."""
        if not hasattr(self, "version"):
            return
        for _ in range(400):
            done = self.last is not None and self.version > self.last and not self.alive()
            if done and self.committed == len(self.log):
                break
            for task_index in self.alive():
                if (task_index, self.newest[task_index].attempt) not in self.failed:
                    self.end(task_index, EventKind.ACCEPTED)
            self.answer()
            self.run.now_s += 10
            self.step(len(self.log))
            self.train()
        assert self.last is not None
        assert self.version == max(self.last + 1, self.rules.first_step)
        self.check_the_end()

    def check_the_end(self):
        totals = self.run.topic.fold(self.rules.first_task_index).totals
        kinds = Counter(self.ended.values())
        assert totals.dispatched == len(self.newest)
        assert totals.accepted == kinds[EventKind.ACCEPTED]
        assert sum(totals.abandoned.values()) == kinds[EventKind.ABANDONED]
        accepted = [t for i, t in self.newest.items() if self.ended[i] is EventKind.ACCEPTED]
        assert all(task.target_step <= self.last for task in accepted)
        if self.last < self.rules.max_steps - 1:
            given = {(task.epoch, task.position) for task in self.newest.values()}
            assert given == {
                (epoch, position)
                for epoch in range(self.rules.max_epochs)
                for position in range(len(self.run.prompts))
            }


World.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestWorld = World.TestCase
