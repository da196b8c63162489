"""The assembler's loop on a real broker: what is written, and what survives what."""

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Message

from schemas import topics as keys
from schemas.codec import decode_as, encode
from schemas.identity import key_of, partition_of
from schemas.limits import HEADER_ROOM
from schemas.records import AssembledGroup, EventKind
from tests.assembling import Run, assembler, assert_whole, shuffled_rows, wait_for
from tests.rows import (
    make_cancel,
    make_failed,
    make_manifest,
    make_row,
    make_rows,
    make_started,
    with_nan_logprob,
)
from tests.run import (
    announce,
    finish,
    read_topic,
    send,
)


def test_rows_out_of_order_become_whole_groups(new_run: Callable[..., Run]) -> None:
    run = new_run()
    sent = shuffled_rows(run.manifest, range(50))
    run.send_rows(sent)
    with assembler(run) as running:
        wait_for("50 groups", lambda: len(run.groups()) == 50, running)
        finish(run.config)
        running.result(60)  # ends by itself
    assert_whole(run, run.groups(), sent)
    for message in read_topic(run.config, run.topics.groups):
        group = decode_as(message.value(), AssembledGroup)
        assert message.partition() == partition_of(group.task_index, 2)
        assert message.key() == key_of(group.task_index)
        assert group.generation_version == 0
    accepted = run.events(EventKind.ACCEPTED)
    assert sorted(event.task_index for event in accepted) == list(range(50))
    assert run.dead_letters() == []


def test_bad_input_ends_in_dlq_and_the_run_goes_on(new_run: Callable[..., Run]) -> None:
    run = new_run()
    manifest = run.manifest
    good = make_rows(manifest, 0)
    bad: list[tuple[str, int, bytes | None]] = [  # reason, partition, value
        ("unknown_schema", 0, b"not avro"),
        ("unknown_schema", 0, b"\xc3\x01" + b"8bytes!!" + good[0][10:]),
        ("malformed", 0, good[0][:-5]),
        ("no_value", 0, None),
        ("wrong_partition", 1, good[0]),
        ("wrong_stamp", 0, encode(make_row(manifest, 0, 0, stamp=bytes(8)))),
        ("wrong_run", 0, encode(make_row(make_manifest("another"), 0, 0))),
        ("too_far_ahead", 0, encode(make_row(manifest, 100_000, 0))),
        ("generation_logprobs", 0, with_nan_logprob(make_row(manifest, 2, 0))),
        ("row_index", 0, encode(make_row(manifest, 4, 4))),
    ]
    send(run.config, run.topics.rows, [(p, b"the key", value) for _, p, value in bad])
    run.send_rows(
        [
            (6, encode(make_row(manifest, 6, 0))),
            (6, encode(make_row(manifest, 6, 0, reward=0.5))),  # partition 0, offset 10
            (8, encode(make_row(manifest, 8, 0))),
            (8, encode(make_row(manifest, 8, 1, agent="another"))),  # offset 12
            *((0, payload) for payload in good),
        ]
    )
    with assembler(run) as running:
        wait_for("group", lambda: len(run.groups()) == 1, running)
    letters = {(m.partition(), header(m, keys.DLQ_OFFSET)): m for m in run.dead_letters()}
    expected = [(reason, partition, value) for reason, partition, value in bad]
    offsets = {0: 0, 1: 0}
    for reason, partition, value in expected:
        letter = letters.pop((partition, str(offsets[partition])))
        offsets[partition] += 1
        assert header(letter, keys.DLQ_REASON) == reason
        assert header(letter, keys.DLQ_TOPIC) == run.topics.rows
        assert header(letter, keys.DLQ_PARTITION) == str(partition)
        assert header(letter, keys.DLQ_MESSAGE)
        assert letter.value() == value
        assert letter.key() == b"the key"
    reasons = {offset: header(letter, keys.DLQ_REASON) for (_, offset), letter in letters.items()}
    assert reasons == {"10": "conflicting_repeat", "12": "agent_differs"}
    failed = {(e.task_index, e.reason) for e in run.events(EventKind.ATTEMPT_FAILED)}
    assert failed == {
        (2, "generation_logprobs"),
        (4, "row_index"),
        (6, "conflicting_repeat"),
        (8, "agent_differs"),
    }


def header(message: Message, name: str) -> str:
    return dict(message.headers())[name].decode()


def test_hostile_sizes_end_in_dlq_too(new_run: Callable[..., Run]) -> None:
    run = new_run(max_row_bytes=64 * 1024)
    largest = bytes(run.config.kafka.limits.row_message_bytes - 200)  # all that `rows` takes
    unpacked = bytes(5_000_000)
    send(run.config, run.topics.rows, [(0, b"k", largest)] * 20)
    send(run.config, run.topics.rows, [(0, b"k", unpacked)], compression="gzip")
    run.send_rows(shuffled_rows(run.manifest, range(1)))
    with assembler(run) as running:
        wait_for("group", lambda: len(run.groups()) == 1, running)
    letters = run.dead_letters()
    assert [header(letter, keys.DLQ_REASON) for letter in letters] == ["unknown_schema"] * 21
    assert "cut from 5000001 bytes" in header(letters[20], keys.DLQ_MESSAGE)
    assert len(letters[20].value()) <= 64 * 1024 + HEADER_ROOM


def test_requests_and_starts_are_answered_on_events(new_run: Callable[..., Run]) -> None:
    run = new_run()
    records = [
        (0, encode(make_started(run.manifest, 0))),
        (1, encode(make_failed(run.manifest, 1))),
        (2, encode(make_cancel(run.manifest, 2))),
    ]
    run.send_rows(records)
    kinds = (EventKind.STARTED, EventKind.ATTEMPT_FAILED, EventKind.ABANDONED)
    with assembler(run) as running:
        wait_for("answers", lambda: len(run.events(*kinds)) == 3, running)
    answers = {event.task_index: event for event in run.events(*kinds)}
    assert [answers[task].kind for task in range(3)] == list(kinds)
    assert answers[1].reason == "gym_error"
    assert answers[2].reason == "attempts_exhausted"


def test_a_group_ahead_of_the_policy_waits_for_it(new_run: Callable[..., Run]) -> None:
    run = new_run()
    ahead = shuffled_rows(run.manifest, range(4), target_step=2, version=2)
    passing = shuffled_rows(run.manifest, range(4, 8))
    run.send_rows(ahead + passing)
    with assembler(run) as running:
        wait_for("passing groups", lambda: len(run.groups()) == 4, running)
    with assembler(run) as running:  # held groups are assembled again after a restart
        time.sleep(1)
        assert len(run.groups()) == 4
        announce(run.config, 1)
        wait_for("held groups", lambda: len(run.groups()) == 8, running)
    assert_whole(run, run.groups(), ahead + passing)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_second_assembler_takes_half_and_gives_it_back(
    new_run: Callable[..., Run], protocol: str
) -> None:
    run = new_run(group_protocol=protocol)
    sent = shuffled_rows(run.manifest, range(60))
    third = len(sent) // 3
    with assembler(run, "a") as first:
        run.send_rows(sent[:third])
        wait_for("a first event", lambda: len(run.groups()) > 0, first)
        with assembler(run, "b") as second:
            for at in range(third, 2 * third, 8):
                run.send_rows(sent[at : at + 8])
            wait_for("groups", lambda: len(run.groups()) > 5, second)
            time.sleep(2)
        run.send_rows(
            [payload for payload in sent[third:] if payload not in sent[third : 2 * third]]
        )
        wait_for("60 groups", lambda: len(run.groups()) == 60, first)
    assert_whole(run, run.groups(), sent)
    accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
    assert sorted(accepted) == list(range(60))


def test_let_go_payloads_are_read_again(new_run: Callable[..., Run]) -> None:
    run = new_run(assembler_memory_bytes=200_000)  # 12 rows of 16 KiB, 3 groups
    rows = {task: make_rows(run.manifest, task, tokens=2048) for task in range(30)}
    sent = [(task, rows[task][index]) for index in range(4) for task in reversed(range(30))]
    run.send_rows(sent)
    with assembler(run) as running:
        wait_for("30 groups", lambda: len(run.groups()) == 30, running)
    assert_whole(run, run.groups(), sent)
