"""The assembler killed at each point of a flush, and asleep there past its session.

The situations of this file run side by side, in `killed` and `slept`: most of their time is waits.
"""

import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from schemas import topics as keys
from schemas.codec import encode
from schemas.records import EventKind
from tests.assembling import WAIT_S, Run, assembler, assert_whole, create, log_of, process, wait_for
from tests.flush_points import ASSIGNED, OFFERED, POINTS, PRODUCED, REVOKING
from tests.rows import make_row, make_rows, make_started

TASKS = 60
SLEEP_S = 12.0
TRANSACTION_MS = 6000
ABORT_CHECK_S = 10.0  # how often a broker looks for old transactions, by default
SLACK_S = 30.0  # a busy machine
SIDE_BY_SIDE = 4
DEADLINE_S = 240.0
PROTOCOLS = ("classic", "consumer")

Records = list[tuple[int, bytes]]


class Told(NamedTuple):
    """What readers of a run's topics find, as far as it must not depend on crashes."""

    groups: Counter[tuple[int, tuple[str, ...]]]
    events: Counter[tuple[Any, ...]]
    dead_letters: Counter[tuple[int, str, str]]


def input_of(run: Run) -> tuple[Records, Records]:
    """Everything to send, in order, and the rows of it that make up the groups."""
    chance, manifest = random.Random(3), run.manifest
    records: Records = []
    good: Records = []
    for first in range(0, TASKS, 6):
        rows = [(t, p) for t in range(first, first + 6) for p in make_rows(manifest, t, tokens=64)]
        started = [(task, encode(make_started(manifest, task))) for task in range(first, first + 6)]
        bad = [
            (first, b"no record"),
            (first + 1, encode(make_row(manifest, first + 1, 0, stamp=bytes(8)))),
        ]
        block = [*rows, *started, *bad, *chance.sample(rows, 3)]  # three of them twice
        chance.shuffle(block)
        good += rows
        records += block
    return records, good


def told(run: Run) -> Told:
    def header(message: Any, name: str) -> str:
        return str(dict(message.headers())[name].decode())

    return Told(
        Counter((g.task_index, tuple(row.rollout_id for row in g.rows)) for g in run.groups()),
        Counter(
            (e.kind, e.task_index, e.attempt, e.row_index, e.rows_offset, e.reason)
            for e in run.events(*EventKind)
        ),
        Counter(
            (m.partition(), header(m, keys.DLQ_OFFSET), header(m, keys.DLQ_REASON))
            for m in run.dead_letters()
        ),
    )


def assert_exactly_once(run: Run, good: Records) -> None:
    assert_whole(run, run.groups(), good)
    accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
    assert sorted(accepted) == list(range(TASKS))


@contextmanager
def fed(run: Run, records: Records) -> Iterator[None]:
    """Sends `records` in pieces meanwhile; all are sent at the end."""

    def feed() -> None:
        for at in range(0, len(records), 12):
            run.send_rows(records[at : at + 12])
            time.sleep(0.1)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    yield
    thread.join()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flush-points")


def new_run(broker: Any, directory: Path, name: str, **kafka: Any) -> Run:
    run = create(broker.bootstrap_servers, f"{name}-{uuid.uuid4().hex[:8]}", directory, **kafka)
    if run.config.kafka.group_protocol == "consumer":
        run.shorten_session()
    return run


# Killed


@dataclass(frozen=True)
class Killed:
    run: Run
    good: Records
    recovery_s: float  # from the kill to the successor's first group


def after_kill(broker: Any, directory: Path, point: str, successor: str) -> Killed:
    """Its assembler `a` was killed at `point`, and `successor` has done the rest."""
    run = new_run(
        broker,
        directory,
        f"killed-{point}-{successor}",
        session_timeout_ms=2000,
        transaction_timeout_ms=TRANSACTION_MS,
    )
    records, good = input_of(run)
    number = "1" if point in (ASSIGNED, REVOKING) else "3"
    with fed(run, records), ExitStack() as others:
        if point == ASSIGNED:
            with process(run, directory, "before"):
                wait_for("a group", lambda: len(run.groups()) > 0)
        with process(run, directory, "a", "kill", point, number) as doomed:
            if point == REVOKING:
                wait_for("a group", lambda: len(run.groups()) > 0)
                others.enter_context(process(run, directory, "b"))
            assert doomed.wait(WAIT_S) == -signal.SIGKILL
        killed_s, before = time.monotonic(), len(run.groups())
        if (point, successor) != (REVOKING, "b"):
            others.enter_context(process(run, directory, successor))
        wait_for("a next group", lambda: len(run.groups()) > before)
        recovery_s = time.monotonic() - killed_s
        wait_for("every record's end", run.is_drained)
    return Killed(run, good, recovery_s)


def quiet(broker: Any, directory: Path) -> Told:
    run = new_run(broker, directory, "quiet")
    records, _ = input_of(run)
    with assembler(run) as running:
        run.send_rows(records)
        wait_for("every record's end", run.is_drained, running)
    return told(run)


@pytest.fixture(scope="module")
def killed(broker: Any, directory: Path) -> Iterator[dict[tuple[str, ...], Future[Any]]]:
    """By (point, successor), and ("quiet",): what a run without a kill tells."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running: dict[tuple[str, ...], Future[Any]] = {
            (point, successor): pool.submit(after_kill, broker, directory, point, successor)
            for point in POINTS
            for successor in ("a", "b")
        }
        yield running | {("quiet",): pool.submit(quiet, broker, directory)}


@pytest.mark.parametrize("successor", ["a", "b"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_it_tells_the_same_as_a_quiet_run(
    killed: dict[tuple[str, ...], Future[Any]], point: str, successor: str
) -> None:
    found: Killed = killed[point, successor].result(DEADLINE_S)
    assert_exactly_once(found.run, found.good)
    assert told(found.run) == killed["quiet",].result(DEADLINE_S)


def test_a_hung_transaction_is_waited_for_and_no_longer_than_it_may_be_open(
    killed: dict[tuple[str, ...], Future[Any]],
) -> None:
    """Killed between offering and commit; nobody of its name comes to fence it."""
    timeout_s = TRANSACTION_MS / 1000
    recovery_s = killed[OFFERED, "b"].result(DEADLINE_S).recovery_s
    assert timeout_s / 2 < recovery_s < timeout_s + ABORT_CHECK_S + SLACK_S


# Asleep


@dataclass(frozen=True)
class Slept:
    run: Run
    good: Records
    taken_over: float  # partitions that the successor had when the sleeper woke
    last_words: str  # of the sleeper


def after_sleep(broker: Any, directory: Path, protocol: str, point: str, *isolation: str) -> Slept:
    """Assembler `a` slept at `point` past its session, `b` came, `a` went on."""
    run = new_run(
        broker,
        directory,
        f"slept-{point}-{protocol}",
        session_timeout_ms=5000,
        transaction_timeout_ms=60_000,
        group_protocol=protocol,
    )
    records, good = input_of(run)
    with (
        process(run, directory, "a", "stop", point, "2", *isolation) as sleeper,
        fed(run, records),
    ):
        stopped = psutil.Process(sleeper.pid)
        wait_for("sleep", lambda: stopped.status() == psutil.STATUS_STOPPED)
        asleep_s = time.monotonic()
        with process(run, directory, "b", *isolation):
            time.sleep(SLEEP_S)
            if point == PRODUCED or isolation:
                wait_for("takeover", lambda: run.heartbeat("b").get("partitions", 0) == 2)
            taken_over = run.heartbeat("b").get("partitions", 0)
            assert time.monotonic() - asleep_s < 50, "the sleeper's transaction must be open"
            os.kill(sleeper.pid, signal.SIGCONT)
            wait_for("every record's end", run.is_drained)
            wait_for("waking", lambda: run.heartbeat("a").get("partitions", 0) == 1)
    return Slept(run, good, taken_over, log_of(run, directory).read_text())


@pytest.fixture(scope="module")
def slept(broker: Any, directory: Path) -> Iterator[dict[tuple[str, ...], Future[Slept]]]:
    situations = [(protocol, point) for protocol in PROTOCOLS for point in (PRODUCED, OFFERED)]
    control = ("classic", OFFERED, "--read-uncommitted")
    with ThreadPoolExecutor(len(situations) + 1) as pool:
        yield {
            situation: pool.submit(after_sleep, broker, directory, *situation)
            for situation in [*situations, control]
        }


@pytest.mark.parametrize("point", [PRODUCED, OFFERED])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_asleep_past_its_session_it_doubles_nothing(
    slept: dict[tuple[str, ...], Future[Slept]], protocol: str, point: str
) -> None:
    found = slept[protocol, point].result(DEADLINE_S)
    assert_exactly_once(found.run, found.good)
    # What is offered hides the commits from the successor; what is not, will never count.
    assert found.taken_over == (0 if point == OFFERED else 2)
    assert point == OFFERED or "transaction void" in found.last_words


def test_without_read_committed_the_sleeper_doubles_groups(
    slept: dict[tuple[str, ...], Future[Slept]],
) -> None:
    """Why schemas.clients fixes isolation.level: the successor begins below what is offered."""
    found = slept["classic", OFFERED, "--read-uncommitted"].result(DEADLINE_S)
    assert found.taken_over == 2
    tasks = Counter(group.task_index for group in found.run.groups())
    assert len(tasks) == TASKS
    assert max(tasks.values()) == 2
