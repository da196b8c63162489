"""The settings that a broker's size limit and ports lead to."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.broker.settings import (
    DEFAULT_RECORD_BYTES,
    MAX_RECORD_BYTES,
    SizeLimits,
    server_properties,
)

KIB, MIB = 1 << 10, 1 << 20


def parsed(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@given(st.integers(1, MAX_RECORD_BYTES))
def test_every_limit_leaves_room_for_the_record(record_bytes: int):
    limits = SizeLimits.of_record(record_bytes)
    assert limits.message >= record_bytes + 64 * KIB  # a dead letter's headers
    assert limits.fetch >= limits.message
    assert limits.message < limits.request < 2**31


@pytest.mark.parametrize("record_bytes", [0, -1, MAX_RECORD_BYTES + 1])
def test_a_size_that_kafka_cannot_count_is_refused_with_both_numbers(record_bytes: int):
    with pytest.raises(ValueError, match=rf"{record_bytes}.*{MAX_RECORD_BYTES}"):
        SizeLimits.of_record(record_bytes)


def test_the_settings_that_the_rules_of_the_run_need():
    settings = parsed(server_properties(Path("/d/data"), 20001, 20002, DEFAULT_RECORD_BYTES))
    assert DEFAULT_RECORD_BYTES == 128 * MIB
    assert settings["message.max.bytes"] == settings["replica.fetch.max.bytes"] == str(129 * MIB)
    assert settings["socket.request.max.bytes"] == str(258 * MIB)
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert settings["log.dirs"] == "/d/data"
    assert settings["auto.create.topics.enable"] == "false"
    assert int(settings["offsets.retention.minutes"]) >= 7 * 24 * 60
    for key in ("group.min", "group.consumer.min"):
        assert settings[f"{key}.session.timeout.ms"] == "1000"


def test_who_comes_through_a_proxy_is_told_the_port_of_that_proxy():
    proxied = {20011: 20021, 20012: 20022}
    settings = parsed(server_properties(Path("/d"), 20001, 20002, MIB, proxied))
    assert settings["listeners"].split(",") == [
        "PLAINTEXT://127.0.0.1:20001",
        "PROXIED20011://127.0.0.1:20011",
        "PROXIED20012://127.0.0.1:20012",
        "CONTROLLER://127.0.0.1:20002",
    ]
    assert settings["advertised.listeners"].split(",") == [
        "PLAINTEXT://127.0.0.1:20001",
        "PROXIED20011://127.0.0.1:20021",
        "PROXIED20012://127.0.0.1:20022",
    ]
    named = {pair.split(":")[0] for pair in settings["listener.security.protocol.map"].split(",")}
    assert named == {"CONTROLLER", "PLAINTEXT", "PROXIED20011", "PROXIED20012"}


def test_a_path_with_other_letters_is_written_as_java_reads_it():
    settings = parsed(server_properties(Path("/päth/a\\b/😀"), 1, 2, MIB))
    assert settings["log.dirs"] == r"/p\u00e4th/a\\b/\ud83d\ude00"
