"""What a cluster must allow follows from two sizes of the run; a shortfall names both numbers."""

import pytest

from infra.broker_limits import ABORT_CHECK, floors_of, retention_warning, shortfalls, warnings
from schemas.config import KafkaConfig
from schemas.limits import MIB


def enough(kafka: KafkaConfig) -> dict[str, str | None]:
    return {floor.setting: str(floor.least) for floor in floors_of(kafka)}


@pytest.mark.parametrize("floor", floors_of(KafkaConfig()))
def test_each_setting_that_is_one_too_small_is_named_with_both_numbers(floor):
    settings = enough(KafkaConfig()) | {floor.setting: str(floor.least - 1)}
    (sentence,) = shortfalls(settings, KafkaConfig())
    assert f"{floor.setting} is {floor.least - 1}, the run needs {floor.least}" in sentence
    assert floor.because in sentence


def test_floors_follow_the_run_and_what_is_not_shown_is_not_judged():
    small, large = KafkaConfig(max_group_bytes=MIB, max_row_bytes=MIB), KafkaConfig()
    assert shortfalls(enough(large), small) == []
    assert {sentence.split(" is ")[0] for sentence in shortfalls(enough(small), large)} == {
        "the broker's message.max.bytes",
        "the broker's replica.fetch.max.bytes",
        "the broker's socket.request.max.bytes",
    }
    assert shortfalls({}, large) == []


def test_a_session_below_the_brokers_least_is_named():
    settings = enough(KafkaConfig()) | {"group.min.session.timeout.ms": "60000"}
    (sentence,) = shortfalls(settings, KafkaConfig())
    assert "60000, above kafka.session_timeout_ms = 10000" in sentence


def test_short_retention_of_offsets_is_told():
    assert retention_warning({"offsets.retention.minutes": "10080"}) is None
    assert "is 60: a run that rests longer than 1.0 hours" in str(
        retention_warning({"offsets.retention.minutes": "60"})
    )


def test_a_hasty_abort_check_is_told():
    assert warnings({ABORT_CHECK: "10000"}) == []
    (sentence,) = warnings({ABORT_CHECK: "1000"})
    assert f"{ABORT_CHECK} is 1000, below Kafka's default of 10000" in sentence
