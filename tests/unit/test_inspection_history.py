"""What `groupstream rows` says of each record is what the assembler did with it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from consumers.admission import Incoming
from consumers.assembler import Assembler
from consumers.decisions import DeadLetter, EmitEvent
from consumers.settlement import SettledSet
from consumers.turn import Now
from infra.inspection.history import Fate, Outcome, Told, history_of
from infra.inspection.letters import letter_of
from infra.inspection.stored import Naming, Place, Stored
from infra.inspection.tasks import TaskBook
from schemas import topics as keys
from schemas.codec import encode
from schemas.identity import key_of
from schemas.records import FailedBy
from tests.rows import make_cancel, make_failed, make_manifest, make_row, make_started

MANIFEST = make_manifest(num_partitions=1, num_generations_per_prompt=2)
TASKS = range(3)


class Line:
    """One partition of `rows`, the real assembler behind it, and what both wrote."""

    def __init__(self, version=5):
        self.assembler = Assembler(MANIFEST, 1 << 20)
        self.assembler.assign(0, 0, SettledSet(), 0)
        self.assembler.announce(version, Now(1, 1.0))
        self.records, self.events, self.letters = [], [], []

    def send(self, task, value, key=None):
        offset = 2 * len(self.records)  # commit markers take offsets too
        key = key_of(task) if key is None else key
        self.records.append(Stored(Place(0, offset), 1000 + offset, key, value, {}))
        incoming = Incoming(0, offset, key, value)
        for decision in self.assembler.receive(incoming, Now(5000 + offset, float(offset))):
            match decision:
                case EmitEvent(event=event):
                    self.events.append(event)
                case DeadLetter():
                    self.letters.append(stored_letter(decision, len(self.letters)))
        return Place(0, offset)

    def history(self, task, *, seen=10**9, from_offset=0, without_records=False):
        naming, book = Naming(MANIFEST.run_id, task), TaskBook(0, 2, 0)
        events = [event for event in self.events if event.task_index == task]
        for event in events:
            book.enter_event(event)
        return history_of(
            book.line(task),
            [] if without_records else [r for r in self.records if naming.matches(r)],
            events,
            [letter_of(stored) for stored in self.letters if naming.matches(stored)],
            Told(0, seen, from_offset),
        )


def stored_letter(letter, offset):
    headers = {
        keys.DLQ_REASON: letter.reason.encode(),
        keys.DLQ_MESSAGE: letter.message.encode(),
        keys.DLQ_TOPIC: b"rows",
        keys.DLQ_PARTITION: str(letter.partition).encode(),
        keys.DLQ_OFFSET: str(letter.offset).encode(),
    }
    return Stored(Place(0, offset), 9000, letter.key, letter.value, headers)


def arrivals(history):
    return [*(a for each in history.attempts for a in each.arrivals), *history.nameless]


def fates(history):
    return {arrival.place.offset: arrival.fate for arrival in arrivals(history)}


def row(task, index, attempt=0, **changes):
    return encode(make_row(MANIFEST, task, index, attempt, **changes))


VALUES = st.builds(
    lambda task, attempt, make: (task, make(task, attempt)),
    st.sampled_from(TASKS),
    st.integers(0, 1),
    st.sampled_from(
        [
            lambda task, attempt: row(task, 0, attempt),
            lambda task, attempt: row(task, 1, attempt),
            lambda task, attempt: row(task, 1, attempt),
            lambda task, attempt: row(task, 0, attempt, reward=9.0),  # another row 0: a conflict
            lambda task, attempt: row(task, 7, attempt),
            lambda task, attempt: row(task, 0, attempt, stamp=bytes(8)),
            lambda task, attempt: row(task, 1, attempt)[:-3],
            lambda task, attempt: encode(make_started(MANIFEST, task, attempt)),
            lambda task, attempt: encode(make_failed(MANIFEST, task, attempt)),
            lambda task, attempt: encode(
                make_failed(MANIFEST, task, attempt, by=FailedBy.DISPATCHER)
            ),
            lambda task, attempt: encode(make_cancel(MANIFEST, task, attempt)),
            lambda *_: b"not avro",
            lambda *_: None,
        ]
    ),
)


@given(st.lists(VALUES, max_size=30))
def test_each_record_has_the_fate_that_the_assembler_counted(sent):
    line = Line()
    for task, value in sent:
        line.send(task, value)
    histories = [line.history(task) for task in TASKS]
    told = [arrival for history in histories for arrival in arrivals(history)]
    assert sorted(a.place for a in told) == [record.place for record in line.records]
    found, counts = Counter(arrival.fate for arrival in told), line.assembler.counts
    assert found[Fate.PLACED] == counts.rows_placed
    assert found[Fate.DEAD_LETTER] == counts.dead_letters
    late_rows = [a for a in told if a.fate is Fate.LATE]
    assert len(late_rows) == counts.rows_late
    duplicate_rows = [a for a in told if a.fate is Fate.DUPLICATE and a.row is not None]
    assert len(duplicate_rows) == counts.rows_duplicate
    assert found[Fate.CANCELLED] == counts.groups_abandoned
    assert sum(a.failed_attempt for a in told) == counts.attempts_failed
    assert found[Fate.UNREAD] == found[Fate.UNKNOWN] == 0
    ends = Counter(attempt.outcome for each in histories for attempt in each.attempts)
    assert ends[Outcome.ACCEPTED] == counts.groups_accepted


@given(st.lists(VALUES, max_size=20))
def test_deleted_rows_are_told_by_events_and_letters(sent):
    """What is placed leaves no trace of its own; everything else keeps place and fate."""
    line = Line()
    for task, value in sent:
        line.send(task, value)
    silent = (Fate.PLACED, Fate.IGNORED)
    for task in TASKS:
        before = {p: fate for p, fate in fates(line.history(task)).items() if fate not in silent}
        assert fates(line.history(task, without_records=True)) == before


def test_what_was_done_and_why():
    line = Line()
    line.send(0, encode(make_started(MANIFEST, 0)))
    line.send(0, row(0, 0))
    line.send(0, row(0, 0))
    line.send(0, encode(make_failed(MANIFEST, 0, message="the gym raised")))
    line.send(0, row(0, 1))
    line.send(0, row(0, 0, 1))
    line.send(0, row(0, 1, 1))
    line.send(0, row(0, 0, 2))
    line.send(0, encode(make_cancel(MANIFEST, 0, 1)))
    history = line.history(0)
    first, second, third = history.attempts
    assert [a.fate for a in first.arrivals] == [
        *(Fate.STARTED, Fate.PLACED, Fate.DUPLICATE, Fate.FAILED_ATTEMPT, Fate.LATE)
    ]
    assert first.arrivals[3].why == "gym_error: the gym raised"
    assert first.arrivals[4].why == "the attempt had failed"
    assert (first.outcome, first.reason, first.rows_placed) == (Outcome.FAILED, "gym_error", 1)
    assert [a.fate for a in second.arrivals] == [Fate.PLACED, Fate.PLACED, Fate.IGNORED]
    assert second.arrivals[2].why == "the task was settled"
    assert (second.outcome, second.rows_placed) == (Outcome.ACCEPTED, 2)
    assert [a.why for a in third.arrivals] == ["the task is settled"]
    assert third.outcome is Outcome.SUPERSEDED


def test_a_conflicting_row_is_a_dead_letter_that_failed_its_attempt():
    line = Line()
    line.send(0, row(0, 0))
    line.send(0, row(0, 0, reward=9.0))
    (attempt,) = line.history(0).attempts
    placed, offender = attempt.arrivals
    assert (placed.fate, placed.failed_attempt) == (Fate.PLACED, False)
    assert (offender.fate, offender.failed_attempt) == (Fate.DEAD_LETTER, True)
    assert offender.why.startswith("conflicting_repeat: task 0 attempt 0 row 0")
    assert attempt.reason == "conflicting_repeat"


def test_what_is_not_committed_yet_is_unread():
    line = Line()
    line.send(0, row(0, 0))
    second = line.send(0, row(0, 1))
    assert fates(line.history(0, seen=second.offset)) == {0: Fate.PLACED, 2: Fate.UNREAD}


def test_where_events_are_deleted_silence_proves_nothing():
    line = Line()
    line.send(0, row(0, 0))
    line.send(0, row(0, 1))
    assert fates(line.history(0, from_offset=2)) == {0: Fate.UNKNOWN, 2: Fate.PLACED}


def test_only_the_task_itself_is_told():
    line = Line()
    line.send(1, row(1, 0), key=key_of(0))  # the record counts, not its key
    line.send(0, row(0, 0), key=b"no number")
    line.send(0, b"not avro")
    assert fates(line.history(0)) == {2: Fate.PLACED, 4: Fate.DEAD_LETTER}
    assert [a.place.offset for a in line.history(0).nameless] == [4]
    assert fates(line.history(1)) == {0: Fate.PLACED}
