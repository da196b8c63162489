import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas import control
from schemas.config import KafkaConfig
from schemas.control import NO_TOPIC, ControlLog, ControlState
from schemas.errors import DeadlineExceeded, ManifestMismatch, RunStopped
from schemas.kafka_errors import PASSING
from schemas.records import Fatal, Finished, LastTarget, PolicyVersion, TargetSize
from schemas.topics import Topics


def test_the_newest_value_of_each_key_stands():
    state = ControlState()
    for version in (0, 1, 3, 2):
        record = PolicyVersion(version=version, weights_dir=f"v{version}", published_at_ms=0)
        state.apply("policy", record)
    state.apply("target/4", TargetSize(target_step=4, groups=2))
    state.apply("last_target", LastTarget(target_step=4))
    state.apply("finished", Finished(step=5, at_ms=0))
    assert (state.policy.version, state.highest_version) == (2, 3)
    assert (state.targets, state.last_target, state.finished.step) == ({4: 2}, 4, 5)


def test_fatal_stops_until_it_is_taken_back():
    state = ControlState()
    state.apply("fatal", Fatal(role="dispatcher", message="3 tasks abandoned", at_ms=0))
    with pytest.raises(RunStopped, match="dispatcher: 3 tasks abandoned"):
        state.raise_if_fatal()
    state.apply("fatal", None)
    state.raise_if_fatal()


NO_OFFSET = -1001


class RestartingBroker:
    """Answers list_offsets with each of `errors`, then with an offset."""

    def __init__(self, errors):
        self.errors = list(errors)

    def list_offsets(self, asked, **_):
        answer = Future()
        if self.errors and self.errors[0] == NO_OFFSET:
            answer.set_result(SimpleNamespace(offset=self.errors.pop(0)))
        elif self.errors:
            answer.set_exception(KafkaException(KafkaError(self.errors.pop(0))))
        else:
            answer.set_result(SimpleNamespace(offset=42))
        return dict.fromkeys(asked, answer)


@pytest.fixture
def log():
    followed = ControlLog(KafkaConfig(bootstrap_servers="127.0.0.1:1"), Topics("run"), "test")
    yield followed
    followed.close()


@pytest.mark.parametrize("code", [*PASSING, *NO_TOPIC, NO_OFFSET])
def test_a_broker_that_is_coming_back_is_asked_again(log, code):
    log._admin = RestartingBroker([code, code])
    assert log._written_end(time.monotonic() + 30) == 42


def test_a_topic_that_stays_away_is_missing(log, monkeypatch):
    monkeypatch.setattr(control, "TOPIC_APPEARS_S", 0.15)
    log._admin = RestartingBroker([KafkaError.UNKNOWN_TOPIC_OR_PART] * 20)
    with pytest.raises(ManifestMismatch, match="does not exist"):
        log._written_end(time.monotonic() + 30)


def test_a_topic_is_missing_only_once_the_broker_says_so(log, monkeypatch):
    """The time before its first answer does not count: the broker was away."""
    monkeypatch.setattr(control, "TOPIC_APPEARS_S", 0.15)
    away = [KafkaError._TRANSPORT] * 4
    log._admin = RestartingBroker([*away, KafkaError.UNKNOWN_TOPIC_OR_PART])
    assert log._written_end(time.monotonic() + 30) == 42


def test_a_broker_that_stays_away_is_waited_for_in_vain(log):
    log._admin = RestartingBroker([KafkaError._TRANSPORT] * 20)
    with pytest.raises(DeadlineExceeded, match="was not told in time"):
        log._written_end(time.monotonic() + 0.3)
