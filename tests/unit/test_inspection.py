"""Letters and marks, where tasks stand, and records as plain values."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.inspection.letters import (
    UNLABELLED,
    LetterBook,
    Mark,
    Resolution,
    Selection,
    by_reason,
    is_mark,
    letter_of,
    mark_headers,
    mark_of,
)
from infra.inspection.record_view import group_view, hex_dump, record_view
from infra.inspection.stored import Naming, Place, Stored
from infra.inspection.tables import sums_line, what_became
from infra.inspection.tasks import Standing, TaskBook, selected, sums_of
from infra.inspection.views import letter_view, line_view, opened_letter_view
from schemas import topics as keys
from schemas.codec import encode
from schemas.identity import key_of
from schemas.records import (
    AssembledGroup,
    EventKind,
    GroupEvent,
    LedgerTask,
    LedgerTotals,
    Purpose,
    TaskState,
    TeacherLogprobs,
)
from schemas.vectors import logprob_bytes
from tests.rows import make_identity, make_manifest, make_row

MANIFEST = make_manifest()
PLACES = st.builds(Place, st.integers(0, 9), st.integers(0, 1 << 40))


def dead(offset, value, reason="malformed", origin=(1, 40)):
    headers = {
        keys.DLQ_REASON: reason.encode(),
        keys.DLQ_MESSAGE: b"because",
        keys.DLQ_TOPIC: b"r.rows",
        keys.DLQ_PARTITION: str(origin[0]).encode(),
        keys.DLQ_OFFSET: str(origin[1]).encode(),
    }
    return Stored(Place(0, offset), 77, b"3", value, headers)


def mark_record(offset, mark):
    return Stored(Place(0, offset), mark.at_ms, None, None, dict(mark_headers(mark)))


def test_a_letter_is_what_its_headers_and_its_record_say():
    letter = letter_of(dead(5, encode(make_row(MANIFEST, 3, 2, 1))))
    assert (letter.reason, letter.message, letter.origin) == ("malformed", "because", (1, 40))
    assert (letter.record, letter.task, letter.attempt, letter.row) == ("RolloutRow", 3, 1, 2)
    unreadable = letter_of(dead(5, b"\xff"))
    assert (unreadable.record, unreadable.task, unreadable.size_bytes) == (None, None, 1)
    foreign = letter_of(Stored(Place(0, 1), 0, None, None, {}))
    assert (foreign.reason, foreign.origin, foreign.size_bytes) == (UNLABELLED, None, 0)


@given(st.sampled_from(Resolution), st.integers(0, 1 << 40), st.none() | PLACES)
def test_a_mark_survives_its_headers(resolution, offset, copy):
    mark = Mark(offset, resolution, 5, copy)
    assert mark_of(mark_record(9, mark)) == mark
    assert is_mark(mark_headers(mark))


def test_what_is_no_mark():
    assert not is_mark(None)
    assert not is_mark([])
    assert not is_mark([(keys.DLQ_REASON, b"x"), (keys.DLQ_OFFSET, None)])


@given(st.data(), st.integers(1, 8))
def test_a_letter_is_open_until_a_mark_names_it(data, count):
    marked = data.draw(st.lists(st.integers(0, count - 1)))
    records = [dead(offset, b"x") for offset in range(count)]
    records += [mark_record(100 + i, Mark(o, Resolution.DROPPED, i)) for i, o in enumerate(marked)]
    book = LetterBook()
    for stored in data.draw(st.permutations(records)):
        book.enter(stored)
    letters = book.letters()
    assert [letter.place.offset for letter in letters] == list(range(count))
    still_open = {each.place.offset for each in letters if Selection().takes(each)}
    assert still_open == set(range(count)) - set(marked)


def test_the_latest_mark_counts():
    book = LetterBook()
    first, dropped = Mark(0, Resolution.REPLAYED, 1, Place(1, 50)), Resolution.DROPPED
    for stored in (dead(0, b"x"), mark_record(1, first), mark_record(2, Mark(0, dropped, 2))):
        book.enter(stored)
    assert book.letters()[0].mark == Mark(0, Resolution.DROPPED, 2)


def test_a_selection_restricts_by_what_it_names():
    row = letter_of(dead(1, encode(make_row(MANIFEST, 3, 0)), "wrong_stamp"))
    noise = letter_of(dead(2, b"x", "unknown_schema"))
    done = noise.marked(Mark(2, Resolution.DROPPED, 1))
    taken = [
        (Selection(), (True, True, False)),
        (Selection(reason="wrong_stamp"), (True, False, False)),
        (Selection(task=3), (True, False, False)),
        (Selection(place=Place(0, 2)), (False, True, False)),
        (Selection(resolved_too=True), (True, True, True)),
    ]
    for selection, expected in taken:
        assert tuple(map(selection.takes, (row, noise, done))) == expected
    assert by_reason([noise, row, noise]) == {"unknown_schema": 2, "wrong_stamp": 1}


def test_an_opened_letter_shows_the_record_or_its_bytes():
    stored = dead(5, encode(make_row(MANIFEST, 3, 2, tokens=20)))
    view = orjson.loads(orjson.dumps(opened_letter_view(letter_of(stored), stored)))
    (trace,) = view["decoded"]["traces"]
    assert trace["token_ids"]["count"] == trace["generation_logprobs"]["count"] == 20
    assert len(trace["token_ids"]["first"]) == 8
    assert (view["hex"], view["key"], view["message"]) == (None, "3", "because")
    assert view["headers"][keys.DLQ_TOPIC] == "r.rows"
    stored = dead(5, b"\xc3\x01?")
    view = opened_letter_view(letter_of(stored), stored)
    assert (view["decoded"], view["hex"]) == (None, "c3013f")
    assert set(letter_view(letter_of(stored))) < set(view)


def test_vectors_of_a_broken_length_are_shown_too():
    row = make_row(MANIFEST, 3, 2)
    broken = encode(row).replace(row.traces[0].token_ids, row.traces[0].token_ids[:-3] + b"abc")
    stored = dead(1, broken)
    assert orjson.dumps(opened_letter_view(letter_of(stored), stored))


def test_a_hex_dump_has_offsets_bytes_and_text():
    dump = hex_dump(b"Kafka\n" + bytes(20), limit=18).splitlines()
    assert dump[0] == f"00000000  4b 61 66 6b 61 0a{' 00' * 10}  Kafka{'.' * 11}"
    assert dump[1] == f"00000010  00 00{' ' * 42}  .."


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.text(max_size=70))
def test_records_are_found_by_their_beginning(task, other, run_id):
    manifest = make_manifest(run_id)
    value = encode(make_row(manifest, task, 0))
    naming = Naming(run_id, other)
    assert naming.matches(Stored(Place(0, 0), 0, None, value, {})) == (task == other)


def event(kind, task, attempt=0, **more):
    fields = make_identity(MANIFEST, task, attempt) | {"kind": kind, "at_ms": 50} | more
    return GroupEvent(**fields)


def ledger_task(task, **more):
    fields = {
        "task_index": task, "attempt": 0, "target_step": 0, "epoch": 0, "position": 0,
        "agent": "sums", "shard": "gym", "replica": 0, "partition": 0, "seq": 0, "min_version": 0,
        "rowidx_start": 0, "dispatched_at_ms": 10,
    }  # fmt: skip
    return LedgerTask(**fields | more)


def enter(book, key, record):
    value = None if record is None else encode(record)
    book.enter_ledger(Stored(Place(0, 0), 0, key, value, {}))


@pytest.fixture
def book():
    """12 tasks of all kinds; the newest checkpoint holds step 0."""
    book = TaskBook(0, 4, trained_steps=1)
    enter(book, b"totals", LedgerTotals(next_task_index=10, dispatched=10))
    for task in range(9):
        enter(book, key_of(task), ledger_task(task))
    enter(book, key_of(6), ledger_task(6, attempt=1, state=TaskState.WAITING, reason="lost_start"))
    enter(book, key_of(7), ledger_task(7, state=TaskState.CANCELLING))
    enter(book, key_of(8), None)  # ended, and its events are deleted; 9 was compacted away
    book.enter_event(event(EventKind.ACCEPTED, 0, shard="gym"))
    book.enter_event(event(EventKind.ACCEPTED, 1, target_step=1))
    book.enter_event(event(EventKind.ABANDONED, 2, reason="too_large", message="5 MiB"))
    book.enter_event(event(EventKind.STARTED, 3, shard="gym", replica=2))
    book.enter_row(make_row(MANIFEST, 4, 1), 60)
    book.enter_row(make_row(MANIFEST, 4, 1), 61)
    book.enter_row(make_row(MANIFEST, 4, 2), 62)
    book.enter_event(event(EventKind.ATTEMPT_FAILED, 5, reason="gym_error"))
    # newer than the ledger that was read
    book.enter_event(event(EventKind.ACCEPTED, 10, purpose=Purpose.VALIDATION))
    rows = [make_row(MANIFEST, 11, index) for index in range(4)]
    header = make_identity(MANIFEST, 11) | {"execution_id": "e", "generation_version": 0}
    book.enter_group(AssembledGroup(**header, accepted_at_ms=70, rows=rows))
    return book


def test_where_each_task_stands(book):
    lines = book.lines()
    assert [(line.standing.value, line.rows) for line in lines] == [
        ("trained", 4),
        ("accepted", 4),
        ("abandoned", None),
        ("open", 0),
        ("open", 2),
        ("waiting", 0),
        ("waiting", 0),
        ("cancelling", 0),
        ("forgotten", None),
        ("forgotten", None),
        ("accepted", 4),
        ("trained", 4),
    ]
    assert (lines[3].replica, lines[5].reason, lines[6].reason) == (2, "gym_error", "lost_start")
    assert (lines[4].agent, lines[4].at_ms, lines[6].attempt) == ("sums", 10, 1)
    assert (lines[11].agent, lines[11].at_ms) == ("sums", 70)
    assert orjson.loads(orjson.dumps(line_view(lines[2])))["reason"] == "too_large"
    assert "too_large (5 MiB)" in what_became(lines[2])
    assert all(what_became(line) for line in lines)


def test_a_failure_that_only_the_ledger_knows_is_one_until_the_next_attempt_begins():
    book = TaskBook(0, 4, 0)
    enter(book, key_of(0), ledger_task(0, state=TaskState.WAITING))
    book.enter_row(make_row(MANIFEST, 0, 1), 60)
    assert book.line(0).standing is Standing.WAITING
    book.enter_event(event(EventKind.STARTED, 0, 1))
    assert (book.line(0).standing, book.line(0).attempt) == (Standing.OPEN, 1)


def test_the_sums_close(book):
    sums = sums_of(book.lines())
    assert sums.dispatched == 12
    assert (sums.accepted, sums.trained, sums.abandoned) == (4, 2, {"too_large": 1})
    assert (sums.outstanding, sums.forgotten) == (5, 2)
    assert sums_line(sums) == (
        "dispatched 12 = accepted 4 (2 trained) + abandoned 1 (too_large 1) + outstanding 5"
        " + forgotten 2"
    )


@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(st.sampled_from(EventKind), st.integers(0, 8), st.integers(0, 2)), max_size=30
    ),
)
def test_the_sums_close_whatever_happened(dispatched, events):
    book = TaskBook(0, 4, 1)
    enter(book, b"totals", LedgerTotals(next_task_index=dispatched))
    for kind, task, attempt in events:
        book.enter_event(event(kind, task, attempt, reason="r"))
    lines = book.lines()
    sums = sums_of(lines)
    assert sums.dispatched == len({*range(dispatched), *(task for _, task, _ in events)})
    parts = (sums.accepted, sum(sums.abandoned.values()), sums.outstanding, sums.forgotten)
    assert sums.dispatched == sum(parts)


def test_filters(book):
    lines = book.lines()
    by_state = {s: [line.task for line in selected(lines, s, None)] for s in Standing}
    assert by_state[Standing.ACCEPTED] == [0, 1, 10, 11]
    assert by_state[Standing.TRAINED] == [0, 11]
    assert [line.task for line in selected(lines, None, 1)] == [1]


def test_a_task_that_was_not_dispatched(book):
    assert not book.knows(12)
    assert book.line(12).standing is Standing.NOT_DISPATCHED
    assert book.knows(9)


def test_a_group_is_shown_without_its_tokens():
    rows = [make_row(MANIFEST, 3, index, tokens=9, version=2) for index in range(4)]
    header = make_identity(MANIFEST, 3) | {"execution_id": "e", "generation_version": 2}
    teacher = TeacherLogprobs(teacher="t", row_index=1, trace_id="3-1", logprobs=logprob_bytes([1]))
    group = AssembledGroup(**header, accepted_at_ms=7, teacher_logprobs=[teacher], rows=rows)
    view = orjson.loads(orjson.dumps(group_view(group)))
    assert [row["row_index"] for row in view["rows"]] == [0, 1, 2, 3]
    assert view["teacher_logprobs"] == [
        {"teacher": "t", "row_index": 1, "trace_id": "3-1", "tokens": 1}
    ]
    assert view["rows"][1]["traces"] == [
        {
            "trace_id": "3-1",
            "model_calls": 1,
            "tokens": 9,
            "sampled_tokens": 7,
            "version_min": 2,
            "version_max": 2,
        }
    ]
    assert record_view(group)["record"] == "AssembledGroup"
