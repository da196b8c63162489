"""The record of what runs in a directory, and pids that belong to something else by now."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.broker import BrokerError, stop_leftover
from infra.broker.directory import BrokerDirectory, Running
from infra.broker.process import find_process

BEFORE = Running("java", 20001, 20002)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """A process whose command line is a broker's."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "kafka.Kafka"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        yield psutil.Process(child.pid)
        child.kill()


@pytest.fixture
def place(tmp_path: Path) -> BrokerDirectory:
    return BrokerDirectory.at(tmp_path / "broker")


def test_the_record_comes_back_as_written(place: BrokerDirectory):
    assert place.read_running() is None
    running = replace(BEFORE, pid=7, created_s=1.5)
    place.write_running(running)
    assert place.read_running() == running
    assert running.ended() == BEFORE


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "odd": 0}'])
def test_a_record_that_cannot_be_read_is_an_error_that_names_the_file(
    place: BrokerDirectory, text: str
):
    place.record.write_text(text)
    with pytest.raises(BrokerError, match=r"broker\.json"):
        place.read_running()


def test_a_leftover_is_found_by_pid_and_start_and_stopped(
    place: BrokerDirectory, sleeper: psutil.Process
):
    place.write_running(replace(BEFORE, pid=sleeper.pid, created_s=sleeper.create_time()))
    assert stop_leftover(place.path, print)
    assert not psutil.pid_exists(sleeper.pid)
    assert place.read_running() == BEFORE
    assert not stop_leftover(place.path, print)


def test_a_pid_that_was_given_to_another_process_is_left_alone(
    place: BrokerDirectory, sleeper: psutil.Process
):
    earlier_s = sleeper.create_time() - 3600
    place.write_running(replace(BEFORE, pid=sleeper.pid, created_s=earlier_s))
    assert not stop_leftover(place.path, print)
    assert sleeper.is_running()


def test_a_process_that_is_no_broker_is_left_alone():
    ourselves = psutil.Process()
    running = replace(BEFORE, pid=ourselves.pid, created_s=ourselves.create_time())
    assert find_process(running) is None


def test_a_process_that_ended_is_not_found(sleeper: psutil.Process):
    running = replace(BEFORE, pid=sleeper.pid, created_s=sleeper.create_time())
    assert find_process(running) is not None
    sleeper.kill()
    sleeper.wait()
    assert find_process(running) is None
