"""Assemblers that come and go, and that are too slow to poll: who has what, and what it wrote."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.assembling import (
    Run,
    assembler,
    assert_each_task_ended_once,
    assert_whole,
    create,
    log_of,
    process,
    shuffled_rows,
    wait_for,
)
from tests.flush_points import PRODUCED

PROTOCOLS = ("classic", "consumer")
TASKS = 120
ANSWER_S = 30.0


@pytest.fixture
def new_run(broker: Any, tmp_path: Path) -> Callable[..., Run]:
    def create_run(name: str, protocol: str = "classic", **kafka: Any) -> Run:
        run_id = f"{name}-{uuid.uuid4().hex[:8]}"
        run = create(broker.bootstrap_servers, run_id, tmp_path, group_protocol=protocol, **kafka)
        if protocol == "consumer":
            run.shorten_session()
        return run

    return create_run


def has(run: Run, **wanted: int) -> bool:
    """Each assembler named has so many partitions."""
    return all(run.heartbeat(name).get("partitions", 0) == count for name, count in wanted.items())


def pieces(sent: list[tuple[int, bytes]], count: int) -> Iterator[list[tuple[int, bytes]]]:
    size = len(sent) // count
    return (sent[at : at + size] for at in range(0, len(sent), size))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_three_assemblers_come_and_go_while_rows_flow(
    new_run: Callable[..., Run], protocol: str
) -> None:
    """Four partitions: all to the first, two each, 2 + 1 + 1, and back."""
    run = new_run("rebalance", protocol, session_timeout_ms=3000, num_partitions=4)
    sent = shuffled_rows(run.manifest, range(TASKS))
    flow = pieces(sent, 6)
    accepted_by = dict.fromkeys("abc", 0.0)
    with assembler(run, "a") as first:
        run.send_rows(next(flow))
        wait_for("all four", lambda: has(run, a=4), first)
        with assembler(run, "b") as second:
            run.send_rows(next(flow))
            wait_for("two each", lambda: has(run, a=2, b=2), second)
            with assembler(run, "c") as third:
                run.send_rows(next(flow))
                wait_for("a share for each", lambda: shares(run) == [1, 1, 2], third)
                run.send_rows(next(flow))
                wait_for("its groups", lambda: run.heartbeat("c").get("groups_accepted", 0) > 0)
            wait_for("two each again", lambda: has(run, a=2, b=2), second)
            run.send_rows(next(flow))
        wait_for("all four again", lambda: has(run, a=4), first)
        for rest in flow:
            run.send_rows(rest)
        wait_for("every record's end", run.is_drained, first)
    for name in accepted_by:
        assert run.heartbeat(name)["groups_accepted"] > 0, name
    assert_whole(run, run.groups(), sent)
    assert_each_task_ended_once(run, TASKS)


def shares(run: Run) -> list[float]:
    return sorted(run.heartbeat(name).get("partitions", 0) for name in "abc")


def test_a_loop_that_does_not_poll_loses_its_partitions_and_goes_on(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """It blocks past max.poll.interval with groups in the open transaction; both protocols."""
    with ThreadPoolExecutor(len(PROTOCOLS)) as pool:
        for found in [pool.submit(blocked, new_run, tmp_path, name) for name in PROTOCOLS]:
            found.result()


def blocked(new_run: Callable[..., Run], directory: Path, protocol: str) -> None:
    run = new_run(
        f"blocked-{protocol}",
        protocol,
        session_timeout_ms=2000,
        transaction_timeout_ms=60_000,
    )
    sent = shuffled_rows(run.manifest, range(60))
    with ExitStack() as processes:
        harm = ("block", PRODUCED, "1", "--max-poll-ms", "3000")
        slow = processes.enter_context(process(run, directory, "a", *harm))
        for piece in pieces(sent, 6):
            run.send_rows(piece)
        wait_for("the block", lambda: "reached produced" in log_of(run, directory).read_text())
        processes.enter_context(process(run, directory, "b"))
        wait_for("takeover", lambda: has(run, b=2))
        os.kill(slow.pid, signal.SIGUSR2)
        wait_for("return", lambda: has(run, a=1, b=1))
        wait_for("every record's end", run.is_drained)
        assert slow.poll() is None
    assert "lost partitions [" in log_of(run, directory).read_text()
    assert_whole(run, run.groups(), sent)
    assert_each_task_ended_once(run, 60)
