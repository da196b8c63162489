"""Which way to a broker is taken, and what is said when none works."""

from pathlib import Path

import pytest

from infra.broker import BrokerUnavailable, provision
from infra.broker.errors import AttemptFailed, WaitTimedOut
from infra.broker.provision import Way, start_broker

LINES: list[str] = []


def failing(error: Exception):
    def find(*_: object):
        raise error

    return find


def test_one_error_says_what_was_tried_why_it_failed_and_the_shortest_fix(tmp_path: Path):
    ways = [
        Way("Docker", "docker", failing(AttemptFailed("no engine answers", "start the engine"))),
        Way("Java", "java", failing(AttemptFailed("java is Java 11, Kafka needs 17", "get 17"))),
    ]
    with pytest.raises(BrokerUnavailable) as raised:
        start_broker(tmp_path, progress=LINES.append, ways=ways)
    text = str(raised.value)
    assert [failure.way for failure in raised.value.failures] == [
        "given bootstrap servers",
        "Docker",
        "Java",
    ]
    assert text.index("none are set") < text.index("no engine answers") < text.index("Java 11")
    assert text.index("- get 17") < text.index("- start the engine")
    assert "kafka.bootstrap_servers" in text


def test_a_wait_that_ran_out_is_a_failure_of_that_way_alone(tmp_path: Path):
    ways = [
        Way("Docker", "docker", failing(WaitTimedOut("pulling: not within 600 s"))),
        Way("Java", "java", failing(AttemptFailed("java is not on the PATH", "install Java"))),
    ]
    with pytest.raises(BrokerUnavailable, match=r"(?s)not within 600 s.*not on the PATH"):
        start_broker(tmp_path, progress=LINES.append, ways=ways)


def test_given_servers_that_do_not_answer_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provision, "GIVEN_ANSWER_S", 0.2)
    ways = [Way("Java", "java", failing(AssertionError("another cluster was started")))]
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*no answer within 0\.2 s"):
        start_broker(tmp_path, bootstrap_servers="127.0.0.1:1", progress=LINES.append, ways=ways)
