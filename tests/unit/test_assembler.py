"""Each rule of assembly, one test. Partition 0 of two: tasks 0, 2, 4, ... of four rows each."""

from io import BytesIO
from typing import Any

import msgspec
import pytest
from fastavro import schemaless_writer

from consumers.admission import Incoming
from consumers.assembler import Assembler
from consumers.decisions import CommitPoint, DeadLetter, Decision, EmitEvent, EmitGroup
from consumers.settlement import MAX_AHEAD, SettledSet
from consumers.turn import Now
from schemas.avro import fingerprint_of, parsed, schema_of
from schemas.codec import MARKER, decode_as, encode, register, row_payloads
from schemas.errors import OffsetsLost
from schemas.limits import HEADER_ROOM
from schemas.records import (
    AssembledGroup,
    EventKind,
    FailedBy,
    PolicyVersion,
    Purpose,
    Record,
    RolloutRow,
)
from tests.rows import (
    make_cancel,
    make_failed,
    make_manifest,
    make_row,
    make_rows,
    make_started,
    with_nan_logprob,
)

MANIFEST = make_manifest()
GIB = 1 << 30


class Bench:
    """An assembler of partition 0 that is fed one record after the other."""

    def __init__(self, budget_bytes: int = GIB, version: int = 0, **manifest: Any) -> None:
        self.manifest = make_manifest(**manifest)
        self.assembler = Assembler(self.manifest, budget_bytes)
        self.now_s = 0.0
        self.assembler.assign(0, 0, SettledSet(), 0)
        self.assembler.announce(version, self.now)
        self.log: list[bytes | None] = []

    @property
    def now(self) -> Now:
        return Now(int(1000 * self.now_s), self.now_s)

    def feed(self, *records: Record | bytes | None) -> list[Decision]:
        decisions: list[Decision] = []
        for record in records:
            value = encode(record) if isinstance(record, Record) else record
            self.log.append(value)
            incoming = Incoming(0, len(self.log) - 1, b"key", value)
            decisions += self.assembler.receive(incoming, self.now)
        return decisions

    def commit(self) -> CommitPoint:
        (point,) = self.assembler.commit_points()
        self.assembler.mark_committed()
        return point

    def restart(self, point: CommitPoint, *, version: int = 0) -> list[Decision]:
        """A new process that reads the log again from `point`."""
        settled, seen = SettledSet.decode(point.metadata)
        self.assembler = Assembler(self.manifest, GIB)
        self.assembler.announce(version, self.now)
        self.assembler.assign(0, point.offset, settled, seen)
        decisions: list[Decision] = []
        for offset in range(point.offset, len(self.log)):
            incoming = Incoming(0, offset, b"key", self.log[offset])
            decisions += self.assembler.receive(incoming, self.now)
        return decisions


def groups(decisions: list[Decision]) -> list[AssembledGroup]:
    emitted = [d for d in decisions if isinstance(d, EmitGroup)]
    return [decode_as(d.value, AssembledGroup) for d in emitted]


def events(decisions: list[Decision]) -> list[tuple[EventKind, int, str]]:
    """(kind, attempt, reason) each."""
    emitted = [d.event for d in decisions if isinstance(d, EmitEvent)]
    return [(event.kind, event.attempt, event.reason) for event in emitted]


def dead(decisions: list[Decision]) -> list[tuple[str, int]]:
    """(reason, offset) each."""
    return [(d.reason, d.offset) for d in decisions if isinstance(d, DeadLetter)]


def failed(attempt: int, reason: str) -> tuple[EventKind, int, str]:
    return EventKind.ATTEMPT_FAILED, attempt, reason


ACCEPTED_0 = (EventKind.ACCEPTED, 0, "")


def test_a_group_is_complete_with_its_last_row_and_in_row_order():
    bench = Bench()
    rows = make_rows(MANIFEST, 0)
    assert bench.feed(rows[2], rows[0], rows[3]) == []
    decisions = bench.feed(rows[1])
    (group,) = groups(decisions)
    assert row_payloads(group) == rows
    assert group.task_index == 0
    assert group.execution_id == "execution-0-0"
    assert events(decisions) == [ACCEPTED_0]
    assert bench.assembler.buffered.used_bytes == 0


def test_the_generation_version_is_the_lowest_of_any_span():
    bench = Bench(version=3)
    rows = [make_row(MANIFEST, 0, i, target_step=3, version=2 + (i != 2)) for i in range(4)]
    decisions = bench.feed(*rows)
    assert groups(decisions)[0].generation_version == 2
    assert decisions[1].event.generation_version == 2


def test_two_tasks_do_not_wait_for_each_other():
    bench = Bench()
    slow, quick = make_rows(MANIFEST, 0), make_rows(MANIFEST, 2)
    assert len(groups(bench.feed(*slow[:3], *quick))) == 1
    assert bench.commit().offset == 0  # task 0 holds the commit
    assert len(groups(bench.feed(slow[3]))) == 1
    assert bench.commit().offset == 8


def test_started_is_told():
    bench = Bench()
    decisions = bench.feed(make_started(MANIFEST, 0))
    assert events(decisions) == [(EventKind.STARTED, 0, "")]
    assert decisions[0].event.shard == "gym"
    assert bench.commit().offset == 0


def test_a_row_of_a_settled_task_is_late():
    bench = Bench()
    rows = make_rows(MANIFEST, 0)
    bench.feed(*rows)
    assert events(bench.feed(rows[1])) == [(EventKind.LATE, 0, "")]
    assert events(bench.feed(make_row(MANIFEST, 0, 1, 1))) == [(EventKind.LATE, 1, "")]
    assert bench.assembler.counts.rows_late == 2
    assert bench.commit().offset == 6


def test_an_identical_repeat_is_dropped():
    bench = Bench()
    rows = make_rows(MANIFEST, 0)
    assert events(bench.feed(rows[0], rows[0])) == [(EventKind.DUPLICATE, 0, "")]
    assert len(groups(bench.feed(*rows[1:]))) == 1


@pytest.mark.parametrize(
    ("offender", "reason"),
    [
        (make_row(MANIFEST, 0, 0, reward=0.5), "conflicting_repeat"),
        (make_row(MANIFEST, 0, 4), "row_index"),
        (make_row(MANIFEST, 0, -1), "row_index"),
        (make_row(MANIFEST, 0, 1, agent="products"), "agent_differs"),
        (make_row(MANIFEST, 0, 1, group_size=5), "group_size_differs"),
        (make_row(MANIFEST, 0, 1, target_step=1), "target_step_differs"),
        (make_row(MANIFEST, 0, 1, purpose=Purpose.VALIDATION), "purpose_differs"),
        (make_row(MANIFEST, 0, 1, execution_id="other"), "execution_id_differs"),
        (make_started(MANIFEST, 0, execution_id="other"), "execution_id_differs"),
        (make_row(MANIFEST, 0, 1, reward=float("nan")), "reward"),
        (with_nan_logprob(make_row(MANIFEST, 0, 1)), "generation_logprobs"),
        (make_row(MANIFEST, 0, 1, traces=[]), "traces"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_poison_goes_to_dlq_and_fails_the_attempt(offender, reason):
    bench = Bench()
    bench.feed(make_row(MANIFEST, 0, 0))
    decisions = bench.feed(offender)
    assert dead(decisions) == [(reason, 1)]
    assert decisions[0].value == bench.log[1]
    assert events(decisions) == [failed(0, reason)]
    assert groups(bench.feed(*make_rows(MANIFEST, 0)[1:])) == []  # the attempt stays failed
    assert len(groups(bench.feed(*make_rows(MANIFEST, 0, 1)))) == 1  # the next one counts


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        (b"", "unknown_schema"),
        (b"\xc3\x01" + bytes(8) + b"body", "unknown_schema"),
        (make_rows(MANIFEST, 0)[0][:-3], "malformed"),
        (make_rows(MANIFEST, 0)[0] + b"x", "malformed"),
        (None, "no_value"),
        (PolicyVersion(version=1, weights_dir="", published_at_ms=0), "unexpected_record"),
        (make_row(make_manifest("other"), 0, 0), "wrong_run"),
        (make_row(MANIFEST, 1, 0), "wrong_partition"),
        (make_row(MANIFEST, 0, 0, stamp=bytes(8)), "wrong_stamp"),
        (make_cancel(MANIFEST, 0, stamp=bytes(8)), "wrong_stamp"),
        (make_row(MANIFEST, 2 * (MAX_AHEAD + 1), 0), "too_far_ahead"),
        (make_cancel(MANIFEST, 2 * (MAX_AHEAD + 1)), "too_far_ahead"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_foreign_record_goes_to_dlq_and_holds_nothing(foreign, reason):
    bench = Bench()
    decisions = bench.feed(foreign)
    assert dead(decisions) == [(reason, 0)]
    assert events(decisions) == []
    assert bench.commit().offset == 1
    assert len(groups(bench.feed(*make_rows(MANIFEST, 0)))) == 1


def test_numbers_beyond_the_stamp_are_a_wrong_stamp():
    row = make_row(MANIFEST, 0, 0)
    wide = encode(row).replace(b"\x08\x00" + row.stamp, b"\x80\x80\x80\x80\x80\x01\x00" + row.stamp)
    assert wide != encode(row)
    assert dead(Bench().feed(wide)) == [("wrong_stamp", 0)]


def test_a_dead_letter_that_no_topic_takes_is_cut():
    bench = Bench(max_row_bytes=2048)
    (letter,) = bench.feed(bytes(10_000_000))
    assert len(letter.value) + len(letter.key) <= 2048 + HEADER_ROOM
    assert "10000003 bytes" in letter.message


def test_a_row_over_the_limit_fails_its_attempt():
    bench = Bench(max_row_bytes=2048)
    decisions = bench.feed(make_row(MANIFEST, 0, 0, tokens=512))
    assert dead(decisions) == [("row_too_large", 0)]
    assert events(decisions) == [failed(0, "row_too_large")]


def test_a_group_over_the_limit_is_abandoned():
    bench = Bench(max_group_bytes=3000)
    decisions = bench.feed(*make_rows(MANIFEST, 0, tokens=128))
    assert events(decisions)[0] == (EventKind.ABANDONED, 0, "too_large")
    assert groups(decisions) == []
    assert bench.assembler.groups_open == 0


def test_the_header_counts_for_the_limit_too():
    rows = make_rows(MANIFEST, 0)
    exact = len(Bench().feed(*rows)[0].value)
    assert len(groups(Bench(max_group_bytes=exact).feed(*rows))) == 1
    decisions = Bench(max_group_bytes=exact - 1).feed(*rows)
    assert events(decisions) == [(EventKind.ABANDONED, 0, "too_large")]


def test_the_shards_word_fails_the_attempt():
    bench = Bench()
    rows = make_rows(MANIFEST, 0)
    decisions = bench.feed(*rows[:2], make_failed(MANIFEST, 0))
    assert events(decisions) == [failed(0, "gym_error")]
    assert events(bench.feed(make_failed(MANIFEST, 0))) == []  # said once
    assert bench.assembler.buffered.used_bytes == 0
    assert bench.commit().offset == 0  # its first offset stays
    bench.feed(*make_rows(MANIFEST, 0, 1))
    assert bench.commit().offset == 8


def test_the_dispatchers_word_is_ignored_for_a_complete_group():
    bench = Bench()
    assert groups(bench.feed(*make_rows(MANIFEST, 0, target_step=2, version=2))) == []  # FULL
    word = make_failed(MANIFEST, 0, by=FailedBy.DISPATCHER, target_step=2)
    assert bench.feed(word) == []
    assert len(groups(bench.assembler.announce(1, bench.now))) == 1


def test_the_dispatchers_word_fails_an_attempt_that_nothing_was_heard_of():
    bench = Bench()
    decisions = bench.feed(make_failed(MANIFEST, 0, by=FailedBy.DISPATCHER))
    assert events(decisions) == [failed(0, "shard_lost")]
    assert groups(bench.feed(*make_rows(MANIFEST, 0))) == []
    assert len(groups(bench.feed(*make_rows(MANIFEST, 0, 1)))) == 1


def test_a_cancel_settles_the_task():
    bench = Bench()
    decisions = bench.feed(make_row(MANIFEST, 0, 0), make_cancel(MANIFEST, 0))
    assert events(decisions) == [(EventKind.ABANDONED, 0, "attempts_exhausted")]
    assert events(bench.feed(make_cancel(MANIFEST, 0))) == []
    assert groups(bench.feed(*make_rows(MANIFEST, 0))) == []


def test_a_cancel_after_acceptance_changes_nothing():
    bench = Bench()
    bench.feed(*make_rows(MANIFEST, 0))
    assert bench.feed(make_cancel(MANIFEST, 0)) == []


def test_a_cancel_of_a_held_group_wins():
    bench = Bench()
    bench.feed(*make_rows(MANIFEST, 0, target_step=5, version=5))
    decisions = bench.feed(make_cancel(MANIFEST, 0, target_step=5))
    assert events(decisions) == [(EventKind.ABANDONED, 0, "attempts_exhausted")]
    assert bench.assembler.announce(9, bench.now) == []


def test_full_waits_with_backoff_and_holds_the_commit():
    bench = Bench()
    bench.feed(*make_rows(MANIFEST, 0, target_step=2, version=2))
    assert bench.commit().offset == 0
    assert bench.assembler.next_offer_s == pytest.approx(0.010)
    for expected_s in (0.015, 0.0225):
        bench.now_s = bench.assembler.next_offer_s
        assert bench.assembler.offer_held(bench.now) == []
        assert bench.assembler.next_offer_s == pytest.approx(bench.now_s + expected_s)
    assert len(groups(bench.assembler.announce(1, bench.now))) == 1
    assert bench.commit().offset == 4


def test_other_groups_pass_a_held_one():
    bench = Bench()
    bench.feed(*make_rows(MANIFEST, 0, target_step=2, version=2))
    assert len(groups(bench.feed(*make_rows(MANIFEST, 2)))) == 1


def test_held_groups_leave_in_the_order_of_their_need():
    bench = Bench()
    for task, target in ((2, 3), (6, 2), (4, 2)):
        bench.feed(*make_rows(MANIFEST, task, target_step=target, version=target))
    left = groups(bench.assembler.announce(2, bench.now))
    assert [group.task_index for group in left] == [4, 6, 2]


def test_stale_fails_the_attempt():
    bench = Bench(version=5)
    decisions = bench.feed(*make_rows(MANIFEST, 0, target_step=5, version=3))
    assert events(decisions) == [failed(0, "stale")]
    assert len(groups(bench.feed(*make_rows(MANIFEST, 0, 1, target_step=5, version=4)))) == 1


def test_validation_is_accepted_whatever_its_versions():
    bench = Bench(version=5)
    rows = make_rows(MANIFEST, 0, target_step=99, group_size=2, purpose=Purpose.VALIDATION)
    assert len(groups(bench.feed(*rows))) == 1


def test_rows_of_two_attempts_are_never_mixed_and_the_first_complete_one_wins():
    bench = Bench()
    old, new = make_rows(MANIFEST, 0), make_rows(MANIFEST, 0, 1)
    assert groups(bench.feed(*old[:3], *new[:3])) == []
    (group,) = groups(bench.feed(new[3], old[3]))
    assert row_payloads(group) == new


def test_of_two_held_attempts_the_first_complete_one_wins():
    bench = Bench()
    old, new = (make_rows(MANIFEST, 0, a, target_step=2, version=2) for a in (0, 1))
    bench.feed(*old[:3], *new, old[3])
    bench.now_s = 0.010
    bench.assembler.offer_held(bench.now)
    (group,) = groups(bench.assembler.announce(1, bench.now))
    assert group.attempt == 1


def test_rows_of_an_older_schema_are_written_as_ours():
    ours = make_rows(MANIFEST, 0)
    older_schema = schema_of("RolloutRow") | {"fields": schema_of("RolloutRow")["fields"][:-1]}
    register(RolloutRow, older_schema)
    out = BytesIO()
    out.write(MARKER + fingerprint_of(parsed(older_schema)))
    fields = msgspec.to_builtins(make_row(MANIFEST, 0, 2), builtin_types=(bytes,))
    schemaless_writer(out, parsed(older_schema), fields)
    older = out.getvalue()
    assert older != ours[2]
    (group,) = groups(Bench().feed(*ours[:2], older, ours[3]))
    assert row_payloads(group) == ours


def test_below_seen_single_records_are_not_told_again():
    bench = Bench()
    told = bench.feed(
        make_started(MANIFEST, 0),
        make_row(MANIFEST, 0, 0),
        make_row(MANIFEST, 0, 0),
        b"malformed",
        make_row(MANIFEST, 2, 0),
        make_row(MANIFEST, 2, 0, reward=0.5),
    )
    assert len(told) == 5
    point = bench.commit()
    assert point.offset == 0
    assert bench.restart(point) == []
    assert bench.assembler.counts.rows_placed == 2
    decisions = bench.feed(make_row(MANIFEST, 2, 1))  # the poisoned attempt is still failed
    assert events(decisions) == [(EventKind.LATE, 0, "")]
    assert len(groups(bench.feed(*make_rows(MANIFEST, 0)[1:]))) == 1


def test_what_an_offer_decides_is_told_again():
    bench = Bench(version=5)
    bench.feed(*make_rows(MANIFEST, 0, target_step=5, version=3))  # stale, and still open
    bench.feed(*make_rows(MANIFEST, 2, target_step=7, version=7))  # held
    decisions = bench.restart(bench.commit(), version=6)
    assert events(decisions) == [failed(0, "stale"), ACCEPTED_0]
    assert len(groups(decisions)) == 1


def test_what_is_settled_above_the_commit_is_known_after_a_restart():
    bench = Bench()
    bench.feed(make_row(MANIFEST, 0, 0), *make_rows(MANIFEST, 2), make_cancel(MANIFEST, 4))
    point = bench.commit()
    assert point.offset == 0
    assert bench.restart(point) == []
    assert events(bench.feed(*make_rows(MANIFEST, 0)[1:])) == [ACCEPTED_0]
    assert bench.commit().offset == 9


def test_seen_never_falls():
    bench = Bench()
    bench.feed(make_row(MANIFEST, 0, 0), *make_rows(MANIFEST, 2))
    point = bench.commit()
    settled, seen = SettledSet.decode(point.metadata)
    assert seen == 5
    again = Assembler(MANIFEST, GIB)
    again.assign(0, point.offset, settled, seen)
    again.receive(Incoming(0, 0, b"", bench.log[0]), bench.now)
    assert SettledSet.decode(again.commit_points()[0].metadata)[1] == 5


def test_nothing_changed_is_nothing_to_commit():
    bench = Bench()
    assert bench.assembler.commit_points() == []
    bench.feed(make_row(MANIFEST, 0, 0))
    bench.commit()
    assert bench.assembler.commit_points() == []


def test_records_of_a_dropped_partition_decide_nothing():
    bench = Bench()
    rows = make_rows(MANIFEST, 0)
    bench.feed(*rows[:3])
    bench.assembler.drop([0])
    assert bench.assembler.buffered.used_bytes == 0
    assert bench.feed(rows[3]) == []
    assert bench.assembler.commit_points() == []


def test_a_record_read_before_decides_nothing():
    bench = Bench()
    bench.feed(make_row(MANIFEST, 0, 0))
    assert bench.assembler.receive(Incoming(0, 0, b"", bench.log[0]), bench.now) == []


class TestMemory:
    """A budget of ten rows; a row has about 0.3 KiB, a group four."""

    size = len(make_rows(MANIFEST, 0)[0])

    def bench(self) -> Bench:
        return Bench(budget_bytes=10 * (self.size + 3))

    def restore(self, bench: Bench) -> list[Decision]:
        decisions: list[Decision] = []
        for number, offset in bench.assembler.payloads_wanted():
            incoming = Incoming(number, offset, b"key", bench.log[offset])
            decisions += bench.assembler.restore(incoming, bench.now)
        return decisions

    def fill(self, bench: Bench) -> None:
        """Tasks 8, 6, 4, 2, 0 with three rows each, all of target 0."""
        for task in (8, 6, 4, 2, 0):
            bench.feed(*make_rows(MANIFEST, task)[:3])

    def test_the_last_needed_payloads_go_first(self):
        bench = self.bench()
        self.fill(bench)
        assert bench.assembler.buffered.used_bytes <= 10 * (self.size + 3)
        assert len(groups(bench.feed(make_rows(MANIFEST, 0)[3]))) == 1  # never let go
        assert len(groups(bench.feed(make_rows(MANIFEST, 2)[3]))) == 1
        assert groups(bench.feed(make_rows(MANIFEST, 8)[3])) == []
        assert bench.commit().offset == 0  # task 8 still holds the commit

    def test_a_complete_group_is_read_again_and_comes_out_whole(self):
        bench = self.bench()
        self.fill(bench)
        bench.feed(make_rows(MANIFEST, 8)[3])
        assert bench.assembler.payloads_wanted() == []  # others are needed before it: no room
        bench.feed(make_rows(MANIFEST, 0)[3])
        (group,) = groups(self.restore(bench))
        assert row_payloads(group) == make_rows(MANIFEST, 8)
        assert bench.assembler.payloads_wanted() == []

    def test_later_needed_groups_make_room(self):
        bench = self.bench()
        rows = make_rows(MANIFEST, 4)
        for task in (2, 0):
            bench.feed(*make_rows(MANIFEST, task)[:3])
        bench.feed(*rows[:3], *make_rows(MANIFEST, 6)[:3])  # 6 and 4 go
        bench.feed(*make_rows(MANIFEST, 8)[:2])
        bench.feed(rows[3])
        assert len(groups(self.restore(bench))) == 1
        assert bench.assembler.buffered.used_bytes <= 10 * (self.size + 3)

    def test_the_first_needed_group_goes_on_over_any_budget(self):
        bench = Bench(budget_bytes=1)
        assert len(groups(bench.feed(*make_rows(MANIFEST, 0)))) == 1

    def test_a_repeat_is_known_after_its_payload_went(self):
        bench = self.bench()
        self.fill(bench)
        assert events(bench.feed(make_rows(MANIFEST, 8)[0])) == [(EventKind.DUPLICATE, 0, "")]
        decisions = bench.feed(make_row(MANIFEST, 6, 0, reward=0.25))
        assert dead(decisions) == [("conflicting_repeat", 16)]

    def test_of_two_attempts_the_later_one_keeps_its_payload(self):
        bench = Bench(budget_bytes=5 * (self.size + 3))
        bench.feed(*make_rows(MANIFEST, 0)[:3], *make_rows(MANIFEST, 0, 1)[:3])
        assert len(groups(bench.feed(make_rows(MANIFEST, 0, 1)[3]))) == 1

    def test_another_record_in_its_place_is_an_error(self):
        bench = self.bench()
        self.fill(bench)
        bench.feed(make_rows(MANIFEST, 8)[3], make_rows(MANIFEST, 0)[3])
        number, offset = bench.assembler.payloads_wanted()[0]
        with pytest.raises(OffsetsLost, match=f"offset {offset} of partition {number}"):
            bench.assembler.restore(Incoming(number, offset, b"", b"another"), bench.now)
