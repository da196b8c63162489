"""What a commit says where it begins, and what is never taken for "no commit"."""

from collections.abc import Iterable
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from consumers import committed
from consumers.committed import CommittedState
from consumers.settlement import SettledSet
from schemas.errors import DeadlineExceeded, GroupstreamError, MetadataUnreadable, OffsetsLost
from schemas.records import EventKind, GroupEvent
from schemas.topics import Topics
from tests.rows import make_identity, make_manifest
from tests.run import make_config

PASSING = [
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.REQUEST_TIMED_OUT,
]
LASTING = [KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART]


class Clock:
    """Each look at it takes a second, and a sleep no time."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def sleep(self, _wait_s: float) -> None:
        pass


class Asked:
    """A consumer that answers committed() with `answers`, one after the other; the last for ever.

    An answer: an error to raise, or (offset, metadata, error of the partition or None).
    """

    def __init__(self, *answers: Any, low: int = 0, high: int = 100) -> None:
        self.answers = list(answers)
        self.ends = low, high
        self.asked = 0

    def committed(self, places: list[TopicPartition], timeout: float) -> list[Any]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [Place(place.partition, *answer) for place in places]

    def get_watermark_offsets(self, _place: Any, timeout: float) -> tuple[int, int]:
        return self.ends


class Place:
    def __init__(
        self, partition: int, offset: int, metadata: str, error: KafkaError | None = None
    ) -> None:
        self.partition, self.offset, self.metadata, self.error = partition, offset, metadata, error


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> CommittedState:
    monkeypatch.setattr(committed, "time", Clock())
    events_are(monkeypatch, [], first=0)
    config = make_config("nowhere:1", "run", tmp_path)
    manifest = make_manifest("run", first_task_index=10)
    return CommittedState(config.kafka, Topics("run"), manifest, [].append)


def events_are(patch: pytest.MonkeyPatch, events: Iterable[GroupEvent], first: int) -> None:
    patch.setattr(committed, "_events", lambda *_: (list(events), first))


def read(state: CommittedState, asked: Asked) -> list[committed.Committed]:
    return state.read(asked, [0, 1])  # type: ignore[arg-type]


GOOD = (40, SettledSet(7, 0b100).encode(55) + "\0", None)


def test_a_commit_is_read_as_it_was_written(state: CommittedState) -> None:
    for found, number in zip(read(state, Asked(GOOD)), (0, 1), strict=True):
        assert (found.partition, found.offset, found.seen) == (number, 40, 55)
        assert [n for n in range(12) if n not in found.settled] == [7, 8, 10, 11]


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize("is_raised", [True, False])
def test_an_error_that_passes_is_asked_again(
    state: CommittedState, code: int, is_raised: bool
) -> None:
    problem = KafkaError(code)
    answer = KafkaException(problem) if is_raised else (OFFSET_INVALID, "", problem)
    asked = Asked(answer, answer, GOOD)
    assert [found.offset for found in read(state, asked)] == [40, 40]
    assert asked.asked == 3


@pytest.mark.parametrize("code", LASTING)
@pytest.mark.parametrize("is_raised", [True, False])
def test_an_error_is_never_taken_for_no_commit(
    state: CommittedState, code: int, is_raised: bool
) -> None:
    problem = KafkaError(code)
    answer = KafkaException(problem) if is_raised else (OFFSET_INVALID, "", problem)
    with pytest.raises(GroupstreamError, match=r"committed offsets of run\.rows, partitions"):
        read(state, Asked(answer))


def test_offsets_that_stay_unstable_are_an_error_in_the_end(state: CommittedState) -> None:
    asked = Asked(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    with pytest.raises(DeadlineExceeded, match="unfinished transaction of another process"):
        read(state, asked)
    assert asked.asked > 10


def test_no_commit_is_a_beginning_where_nothing_happened(state: CommittedState) -> None:
    found = read(state, Asked((OFFSET_INVALID, "")))
    assert [(place.offset, place.seen) for place in found] == [(0, 0), (0, 0)]
    assert [place.settled.watermark for place in found] == [5, 5]  # first_task_index 10, P 2


@pytest.mark.parametrize("kind", [EventKind.ACCEPTED, EventKind.ABANDONED])
def test_no_commit_where_tasks_were_settled_names_them(
    state: CommittedState, monkeypatch: pytest.MonkeyPatch, kind: EventKind
) -> None:
    identity = make_identity(make_manifest("run"), 12)
    events_are(monkeypatch, [GroupEvent(**identity, kind=kind, at_ms=1)], first=0)
    with pytest.raises(OffsetsLost, match=r"settled tasks \[12\]"):
        read(state, Asked((OFFSET_INVALID, "")))


def test_events_that_were_truncated_are_a_past(
    state: CommittedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    events_are(monkeypatch, [], first=3)
    with pytest.raises(OffsetsLost, match="`events` begins at offset 3"):
        read(state, Asked((OFFSET_INVALID, "")))


def test_rows_that_are_gone_are_a_past(state: CommittedState) -> None:
    with pytest.raises(OffsetsLost, match="begins at offset 5"):
        read(state, Asked((OFFSET_INVALID, ""), low=5))


@pytest.mark.parametrize("ends", [(41, 100), (0, 39)])
def test_a_commit_outside_of_the_topic_names_the_tasks(
    state: CommittedState, ends: tuple[int, int]
) -> None:
    with pytest.raises(OffsetsLost, match=r"tasks \[14, 16\] and all from 20 on"):
        read(state, Asked(GOOD, low=ends[0], high=ends[1]))


@pytest.mark.parametrize("metadata", ["", "someone else's", "AAAA"])
def test_metadata_that_can_not_be_read_is_an_error(state: CommittedState, metadata: str) -> None:
    with pytest.raises(MetadataUnreadable):
        read(state, Asked((40, metadata)))
