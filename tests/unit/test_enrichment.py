"""A complete group and its teacher: who is asked when, and what an answer is still good for."""

from typing import Any

import pytest

from consumers.admission import Incoming
from consumers.assembler import Assembler
from consumers.decisions import CommitPoint, Decision, EmitEvent, EmitGroup
from consumers.enrichment import TeacherRequest, logprobs_of
from consumers.settlement import SettledSet
from consumers.turn import Now
from schemas.codec import decode_as, encode
from schemas.records import AssembledGroup, EventKind, Purpose, Record, RolloutRow
from tests.rows import make_cancel, make_failed, make_manifest, make_row, make_rows

MANIFEST = make_manifest()
TERMINAL = (EventKind.ACCEPTED, EventKind.ABANDONED)
TEACHER_OF = {"sums": "t", "products": "u"}


class Bench:
    """An assembler of partition 0, which is fed one record after the other."""

    def __init__(self, version: int = 0, budget_bytes: int = 1 << 30) -> None:
        self.log: list[bytes] = []
        self.budget_bytes = budget_bytes
        self.version = version
        self.begin(CommitPoint(0, 0, SettledSet().encode(0)))

    @property
    def now(self) -> Now:
        return Now(0, 0.0)

    def begin(self, point: CommitPoint) -> list[Decision]:
        """A process that reads the log from `point`."""
        self.assembler = Assembler(MANIFEST, self.budget_bytes, TEACHER_OF.get)
        self.assembler.announce(self.version, self.now)
        settled, seen = SettledSet.decode(point.metadata)
        self.assembler.assign(0, point.offset, settled, seen)
        return [d for at in range(point.offset, len(self.log)) for d in self.read(at)]

    def read(self, offset: int) -> list[Decision]:
        return self.assembler.receive(Incoming(0, offset, b"k", self.log[offset]), self.now)

    def feed(self, *records: Record | bytes) -> list[Decision]:
        decisions = []
        for record in records:
            self.log.append(encode(record) if isinstance(record, Record) else record)
            decisions += self.read(len(self.log) - 1)
        return decisions

    def commit(self) -> CommitPoint:
        (point,) = self.assembler.commit_points()
        self.assembler.mark_committed()
        return point

    def asked(self, teacher: str = "t") -> TeacherRequest:
        request = self.assembler.teacher_request(teacher)
        assert request is not None
        return request

    def answer(self, request: TeacherRequest) -> list[Decision]:
        found = logprobs_of(request, [bytes(len(s.token_ids)) for s in request.sequences])
        return self.assembler.teacher_answered(request.number, found, self.now)


def kinds(decisions: list[Decision]) -> list[EventKind]:
    return [d.event.kind for d in decisions if isinstance(d, EmitEvent)]


def groups(decisions: list[Decision]) -> list[AssembledGroup]:
    return [decode_as(d.value, AssembledGroup) for d in decisions if isinstance(d, EmitGroup)]


def rows(task: int, **rest: Any) -> list[bytes]:
    return make_rows(MANIFEST, task, **rest)


def test_a_complete_group_is_accepted_with_its_answer() -> None:
    bench = Bench()
    assert bench.feed(*rows(0)) == []
    request = bench.asked()
    sent = [decode_as(payload, RolloutRow) for payload in rows(0)]
    assert [s.token_ids for s in request.sequences] == [r.traces[0].token_ids for r in sent]
    (group,) = groups(bench.answer(request))
    assert [(t.teacher, t.row_index) for t in group.teacher_logprobs] == [
        ("t", index) for index in range(4)
    ]
    assert [t.logprobs for t in group.teacher_logprobs] == [
        bytes(len(row.traces[0].token_ids)) for row in sent
    ]
    assert bench.answer(request) == []  # told twice, accepted once


def test_agents_without_a_teacher_and_validation_are_offered_at_once() -> None:
    bench = Bench()
    assert len(groups(bench.feed(*rows(0, agent="plain")))) == 1
    assert len(groups(bench.feed(*rows(2, purpose=Purpose.VALIDATION)))) == 1


def test_a_teacher_has_one_request_at_a_time_the_first_needed_one() -> None:
    bench = Bench(version=1)
    bench.feed(*rows(4, target_step=1, version=1), *rows(2), *rows(6, agent="products"))
    assert bench.asked().task_index == 2
    assert bench.asked().task_index == 4  # the caller asks when the teacher is idle
    assert bench.assembler.teacher_request("t") is None
    assert bench.asked("u").task_index == 6


def test_a_group_ahead_of_the_policy_is_taught_while_it_waits() -> None:
    bench = Bench()
    bench.feed(*rows(0, target_step=2, version=2))
    assert bench.answer(bench.asked()) == []
    (held,) = bench.assembler.buffered.held.values()
    assert held.teacher_logprobs is not None
    assert len(groups(bench.assembler.announce(1, bench.now))) == 1


def test_a_stale_group_never_asks() -> None:
    bench = Bench(version=2)
    assert kinds(bench.feed(*rows(0, target_step=2))) == [EventKind.ATTEMPT_FAILED]
    assert bench.assembler.teacher_request("t") is None


def test_a_failed_teacher_fails_the_attempt_and_says_so_again_after_a_crash() -> None:
    bench = Bench()
    bench.feed(*rows(0))
    point = bench.commit()
    for _ in range(2):
        number = bench.asked().number
        (event,) = bench.assembler.teacher_failed(number, "no answer", bench.now)
        assert isinstance(event, EmitEvent)
        assert (event.event.reason, event.event.message) == ("teacher_failed", "no answer")
        bench.begin(point)
    assert point.offset == 0


@pytest.mark.parametrize("ended_by", ["cancel", "failure", "lost partition"])
def test_an_answer_that_comes_too_late_is_dropped(ended_by: str) -> None:
    bench = Bench()
    bench.feed(*rows(0))
    request = bench.asked()
    match ended_by:
        case "cancel":
            assert kinds(bench.feed(make_cancel(MANIFEST, 0))) == [EventKind.ABANDONED]
        case "failure":
            assert kinds(bench.feed(make_failed(MANIFEST, 0))) == [EventKind.ATTEMPT_FAILED]
        case _:
            bench.assembler.drop([0])
    assert bench.answer(request) == []
    assert bench.assembler.enrichment.waiting() == []


@pytest.mark.parametrize("order", [("answer", "cancel"), ("cancel", "answer")])
@pytest.mark.parametrize("crashes_at", range(3))
@pytest.mark.parametrize("after_the_flush", [True, False])
def test_cancel_and_answer_cross_with_a_crash_at_each_point(
    order: tuple[str, str], crashes_at: int, after_the_flush: bool
) -> None:
    bench = Bench()
    point = CommitPoint(0, 0, SettledSet().encode(0))
    told: list[EventKind] = []
    for at, step in enumerate(("rows", *order)):
        match step:
            case "rows":
                decided = bench.feed(*rows(0))
            case "cancel":
                decided = bench.feed(make_cancel(MANIFEST, 0))
            case _:
                request = bench.assembler.teacher_request("t")
                decided = bench.answer(request) if request else []
        if at == crashes_at and not after_the_flush:
            decided = bench.begin(point)
        told += kinds(decided)
        if bench.assembler.has_changed:
            point = bench.commit()
        if at == crashes_at and after_the_flush:
            told += kinds(bench.begin(point))
    assert len([kind for kind in told if kind in TERMINAL]) == 1


def test_a_group_too_large_with_its_answer_is_abandoned() -> None:
    manifest = make_manifest(max_group_bytes=sum(len(row) for row in rows(0)) + 100)
    assembler = Assembler(manifest, 1 << 30, TEACHER_OF.get)
    assembler.announce(0, Now(0, 0.0))
    assembler.assign(0, 0, SettledSet(), 0)
    for offset, payload in enumerate(rows(0)):
        assert assembler.receive(Incoming(0, offset, b"k", payload), Now(0, 0.0)) == []
    request = assembler.teacher_request("t")
    assert request is not None
    found = logprobs_of(request, [bytes(len(s.token_ids)) for s in request.sequences])
    (event,) = assembler.teacher_answered(request.number, found, Now(0, 0.0))
    assert isinstance(event, EmitEvent)
    assert (event.event.kind, event.event.reason) == (EventKind.ABANDONED, "too_large")


def test_rows_that_were_let_go_are_read_again_for_the_teacher() -> None:
    size = sum(len(row) for row in rows(0))
    bench = Bench(budget_bytes=int(size * 1.5))
    bench.feed(*rows(0), *rows(2))
    assert bench.answer(bench.asked()) != []  # task 0; task 2 was let go
    assert bench.assembler.teacher_request("t") is None
    wanted = bench.assembler.payloads_wanted()
    assert [offset for _, offset in wanted] == [4, 5, 6]  # the last one came after that
    for partition, offset in wanted:
        incoming = Incoming(partition, offset, b"k", bench.log[offset])
        assert bench.assembler.restore(incoming, bench.now) == []
    assert len(groups(bench.answer(bench.asked()))) == 1


def test_a_row_without_traces_has_nothing_to_ask() -> None:
    bench = Bench()
    bench.feed(*(make_row(MANIFEST, 0, i, traces=[], masked=True) for i in range(4)))
    request = bench.asked()
    assert request.sequences == []
    assert len(groups(bench.answer(request))) == 1
