"""The assembler under kill -9, a stopped process, a second one of its name, lost offsets."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewPartitions

from schemas import topics as keys
from schemas.codec import encode
from schemas.errors import Fenced, ManifestMismatch, MetadataUnreadable, OffsetsLost, RunStopped
from schemas.records import Fatal
from tests.assembling import (
    Run,
    assembler,
    assert_each_task_ended_once,
    assert_whole,
    log_of,
    process,
    shuffled_rows,
    wait_for,
)
from tests.rows import make_row
from tests.run import control

ANSWER_S = 30.0


def test_kill_9_loses_nothing_and_doubles_nothing(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, tasks, kills = new_run(), 400, 5
    sent = shuffled_rows(run.manifest, range(tasks), tokens=512)
    chance = random.Random(7)
    at = 0
    for _ in range(kills):
        with process(run, tmp_path):
            before = len(run.groups())
            end = time.monotonic() + chance.uniform(0.5, 1.5)
            wait_for("start", lambda: run.heartbeat("a").get("partitions", 0) > 0)
            while time.monotonic() < end or len(run.groups()) == before == 0:
                run.send_rows(sent[at : at + 20])
                at += 20
    run.send_rows(sent[at:])
    with process(run, tmp_path):
        wait_for(f"{tasks} groups", lambda: len(run.groups()) >= tasks)
    assert_whole(run, run.groups(), sent)
    assert_each_task_ended_once(run, tasks)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_process_that_sleeps_past_its_session_doubles_nothing(
    new_run: Callable[..., Run], tmp_path: Path, protocol: str
) -> None:
    run = new_run(session_timeout_ms=2000, group_protocol=protocol)
    run.shorten_session()
    sent = shuffled_rows(run.manifest, range(200), tokens=512)
    with process(run, tmp_path, "a") as sleeper:
        run.send_rows(sent[:200])
        wait_for("a group", lambda: len(run.groups()) > 0)
        run.send_rows(sent[200:400])
        os.kill(sleeper.pid, signal.SIGSTOP)
        with process(run, tmp_path, "b"):
            run.send_rows(sent[400:600])
            wait_for("takeover", lambda: run.heartbeat("b").get("partitions", 0) == 2)
            os.kill(sleeper.pid, signal.SIGCONT)
            run.send_rows(sent[600:])
            wait_for("200 groups", lambda: len(run.groups()) >= 200)
            # Asleep for longer than its transaction may be open, it wakes fenced by the broker.
            wait_for(
                "waking",
                lambda: run.heartbeat("a").get("partitions", 0) == 1 or sleeper.poll() is not None,
            )
            assert sleeper.poll() is None or "errors.Fenced" in log_of(run, tmp_path).read_text()
    assert_whole(run, run.groups(), sent)
    assert_each_task_ended_once(run, 200)


def test_a_second_process_of_the_same_name_fences_the_first(new_run: Callable[..., Run]) -> None:
    run = new_run()
    with assembler(run, "a", ends_with=Fenced, saying="took over") as first:
        wait_for("partitions", lambda: run.heartbeat("a").get("partitions", 0) == 2, first)
        with assembler(run, "a"):
            run.send_rows(shuffled_rows(run.manifest, range(20)))
            wait_for("20 groups", lambda: len(run.groups()) == 20)
            wait_for("fencing", first.done)
    assert_each_task_ended_once(run, 20)


def assembled(run: Run, tasks: int) -> None:
    """`tasks` groups, by an assembler that ended in order."""
    run.send_rows(shuffled_rows(run.manifest, range(tasks)))
    with assembler(run) as running:
        wait_for(f"{tasks} groups", lambda: len(run.groups()) == tasks, running)


def test_deleted_offsets_are_an_error_where_tasks_were_settled(new_run: Callable[..., Run]) -> None:
    run = new_run()
    assembled(run, 4)
    group = run.topics.assembler_group
    admin = run.admin()
    admin.delete_consumer_groups([group])[group].result(ANSWER_S)
    with assembler(
        run, ends_with=OffsetsLost, saying=r"settled tasks \[0, 2\]|\[1, 3\]"
    ) as running:
        wait_for("the error", running.done)


def test_rows_that_retention_took_are_an_error_that_names_the_tasks(
    new_run: Callable[..., Run],
) -> None:
    run = new_run()
    run.send_rows([(0, encode(make_row(run.manifest, 0, 0)))])
    run.send_rows(shuffled_rows(run.manifest, range(2, 6, 2)))
    with assembler(run) as running:
        wait_for("2 groups", lambda: len(run.groups()) == 2, running)
    admin = run.admin()
    deleted = admin.delete_records([TopicPartition(run.topics.rows, 0, 5)])
    next(iter(deleted.values())).result(ANSWER_S)
    with assembler(
        run, ends_with=OffsetsLost, saying=r"outside 5\.\.9.*tasks \[0\] and all from 6"
    ) as running:
        wait_for("the error", running.done)


def test_unreadable_metadata_is_an_error(new_run: Callable[..., Run]) -> None:
    run = new_run()
    consumer = Consumer(
        {
            "bootstrap.servers": run.config.kafka.bootstrap_servers,
            "group.id": run.topics.assembler_group,
        }
    )
    place = TopicPartition(run.topics.rows, 0, 0, metadata="someone else's")
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()
    with assembler(run, ends_with=MetadataUnreadable, saying="someone else") as running:
        wait_for("the error", running.done)


def test_another_partition_count_is_an_error(new_run: Callable[..., Run]) -> None:
    run = new_run()
    admin = run.admin()
    admin.create_partitions([NewPartitions(run.topics.rows, 3)])[run.topics.rows].result(ANSWER_S)
    with assembler(
        run, ends_with=ManifestMismatch, saying="rows has 3 partitions.* with 2"
    ) as running:
        wait_for("the error", running.done)


def test_a_fatal_run_stops_with_its_message(new_run: Callable[..., Run]) -> None:
    run = new_run()
    with assembler(run, ends_with=RunStopped, saying="dispatcher: too many failures") as running:
        wait_for("partitions", lambda: run.heartbeat("a").get("partitions", 0) == 2, running)
        fatal = Fatal(role="dispatcher", message="too many failures", at_ms=1)
        control(run.config, keys.CONTROL_FATAL, encode(fatal))
        wait_for("the end", running.done)
