"""Which error of the producer means what, with a producer that errs as told."""

from collections import defaultdict
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from consumers import transaction
from consumers.decisions import CommitPoint
from consumers.transaction import Transactions, Void
from schemas.errors import DeadlineExceeded, Fenced
from tests.run import make_config

RETRIABLE = KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True)
ABORTABLE = KafkaError(KafkaError.ILLEGAL_GENERATION, "rebalanced", txn_requires_abort=True)
STRANGE = KafkaError(KafkaError.UNKNOWN, "who knows")
FATAL = KafkaError(KafkaError.INVALID_TXN_STATE, "no way on", fatal=True)
FENCED = [
    KafkaError(KafkaError._FENCED, "newer", fatal=True),
    KafkaError(KafkaError.PRODUCER_FENCED, "newer", fatal=True),
    KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, "too old", txn_requires_abort=True),
]
POINTS = [CommitPoint(0, 7, "settled")]


class ErringProducer:
    """Raises what `errors` has for a call, first to last, then works; `calls` in order."""

    errors: dict[str, list[Exception]]
    calls: list[str]
    made: int

    def __init__(self, _settings: dict[str, Any]) -> None:
        type(self).made += 1

    def __getattr__(self, name: str) -> Any:
        def call(*_rest: Any, **_named: Any) -> int:
            self.calls.append(name)
            if self.errors[name]:
                raise self.errors[name].pop(0)
            return 0

        return call


class Group:
    """A consumer, as far as a commit asks it."""

    def consumer_group_metadata(self) -> str:
        return "member"


class Clock:
    """Each look at it takes a second."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> type[ErringProducer]:
    class Producer(ErringProducer):
        made = 0

    Producer.errors, Producer.calls = defaultdict(list), []

    monkeypatch.setattr(transaction, "Producer", Producer)
    monkeypatch.setattr(transaction, "time", Clock())
    return Producer


@pytest.fixture
def waits() -> list[str]:
    return []


@pytest.fixture
def transactions(producer: type[ErringProducer], waits: list[str], tmp_path: Any) -> Transactions:
    kafka = make_config("nowhere:1", "run", tmp_path).kafka
    opened = Transactions(kafka, "client", "run.assembler.a", waits.append)
    producer.calls.clear()
    return opened


def commit(transactions: Transactions) -> None:
    transactions.commit("rows", POINTS, Group())  # type: ignore[arg-type]


CALLS = ["send_offsets_to_transaction", "commit_transaction"]


@pytest.mark.parametrize("call", CALLS)
def test_a_retriable_error_is_tried_again(
    producer: type[ErringProducer], transactions: Transactions, waits: list[str], call: str
) -> None:
    producer.errors[call] = [KafkaException(RETRIABLE)] * 2
    commit(transactions)
    assert producer.calls.count(call) == 3
    assert len(waits) == 2
    assert call in waits[0]
    assert transactions.committed == 1
    assert transactions.opened_s is None


@pytest.mark.parametrize("call", CALLS)
def test_what_stays_retriable_is_void_in_the_end(
    producer: type[ErringProducer], transactions: Transactions, call: str
) -> None:
    producer.errors[call] = [KafkaException(RETRIABLE)] * 1000
    with pytest.raises(Void, match=call):
        commit(transactions)
    assert transactions.committed == 0
    assert transactions.opened_s is not None  # so that abort() ends it


@pytest.mark.parametrize("error", [ABORTABLE, STRANGE])
@pytest.mark.parametrize("call", ["begin_transaction", "produce", *CALLS])
def test_an_error_that_is_not_retriable_is_void_at_once(
    producer: type[ErringProducer], transactions: Transactions, call: str, error: KafkaError
) -> None:
    producer.errors[call] = [KafkaException(error)]
    with pytest.raises(Void, match=call):
        transactions.produce("groups", 0, b"k", b"v")
        commit(transactions)
    assert producer.calls.count(call) == 1
    assert transactions.committed == 0
    transactions.abort()
    assert transactions.opened_s is None
    assert not transactions.carries_groups


@pytest.mark.parametrize("error", FENCED, ids=lambda error: error.name())
@pytest.mark.parametrize("call", ["begin_transaction", "produce", *CALLS])
def test_a_fenced_producer_ends_and_says_why(
    producer: type[ErringProducer], transactions: Transactions, call: str, error: KafkaError
) -> None:
    producer.errors[call] = [KafkaException(error)]
    with pytest.raises(Fenced, match=rf"run\.assembler\.a: {call}: .*newer process"):
        transactions.produce("groups", 0, b"k", b"v")
        commit(transactions)
    assert producer.made == 1  # it would fence the newer one


def test_a_fatal_error_is_no_void(
    producer: type[ErringProducer], transactions: Transactions
) -> None:
    producer.errors["commit_transaction"] = [KafkaException(FATAL)]
    with pytest.raises(KafkaException, match="no way on"):
        commit(transactions)


def test_a_full_queue_is_waited_for(
    producer: type[ErringProducer], transactions: Transactions, waits: list[str]
) -> None:
    producer.errors["produce"] = [BufferError("full")] * 3
    transactions.produce("groups", 0, b"k", b"v")
    assert producer.calls.count("produce") == 4
    assert len(waits) == 3
    producer.errors["produce"] = [BufferError("full")] * 1000
    with pytest.raises(Void, match="queue stayed full"):
        transactions.produce("groups", 0, b"k", b"v")


@pytest.mark.parametrize("error", [ABORTABLE, FATAL])
def test_a_producer_that_can_not_abort_is_given_up_for_a_new_one(
    producer: type[ErringProducer], transactions: Transactions, error: KafkaError
) -> None:
    """A new one's init_transactions ends the transaction; the old one may not even close."""
    transactions.produce("groups", 0, b"k", b"v")
    producer.errors["abort_transaction"] = [KafkaException(error)]
    producer.errors["close"] = [KafkaException(FATAL)]
    transactions.abort()
    assert producer.made == 2
    assert producer.calls.index("init_transactions", 1) < producer.calls.index("close")
    assert transactions.opened_s is None
    commit(transactions)
    assert transactions.committed == 1


def test_a_fenced_producer_does_not_come_back_by_its_abort(
    producer: type[ErringProducer], transactions: Transactions
) -> None:
    transactions.produce("groups", 0, b"k", b"v")
    producer.errors["abort_transaction"] = [KafkaException(FENCED[0])]
    with pytest.raises(Fenced):
        transactions.abort()
    assert producer.made == 1


def test_closing_never_hides_why_the_process_ends(
    producer: type[ErringProducer], transactions: Transactions
) -> None:
    """close() runs while another error is on its way."""
    transactions.produce("groups", 0, b"k", b"v")
    producer.errors["abort_transaction"] = [KafkaException(FENCED[0])]
    producer.errors["close"] = [KafkaException(FENCED[0])]
    transactions.close(1.0)


def test_a_broker_that_never_answers_is_an_error_that_says_so(
    producer: type[ErringProducer], tmp_path: Any
) -> None:
    producer.errors["init_transactions"] = [KafkaException(RETRIABLE)] * 1000
    kafka = make_config("nowhere:1", "run", tmp_path).kafka
    with pytest.raises(DeadlineExceeded, match="does the broker answer"):
        Transactions(kafka, "client", "run.assembler.a", [].append)
