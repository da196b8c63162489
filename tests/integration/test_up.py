"""`groupstream up`'s supervisor with real processes and a real broker."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
from confluent_kafka import Producer
from rich.console import Console

from infra.broker.broker import GivenBroker
from infra.init import control_state, init_run
from infra.screen.screen import Screen
from infra.up import stopping
from infra.up.child import Child
from infra.up.pid_file import read_pids
from infra.up.resume import resume
from infra.up.roles import RoleProcess, environment_of
from infra.up.run import Session
from infra.up.supervisor import Supervisor
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.control import ControlLog
from schemas.records import Fatal, Finished
from schemas.topics import CONTROL_FATAL, CONTROL_FINISHED, Topics

UNTIL_TERMINATED = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
FOLLOWS = """
import sys, time
from schemas.config import KafkaConfig
from schemas.control import ControlLog
from schemas.topics import Topics
servers, run_id = sys.argv[1:]
control = ControlLog(KafkaConfig(bootstrap_servers=servers), Topics(run_id), "follower")
state = control.read_to_end()
while not (state.finished or state.fatal):
    control.poll(0.1)
sys.exit(1 if state.fatal else 0)
"""


@pytest.fixture
def config(broker, run_id, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    made = Config.model_validate(
        {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers},
            "data": {"train_jsonl_fpath": str(prompts)},
            "policy": {"model_name": "none"},
            "env": {"agents": {"sums": {"gym": "a:B"}}},
        }
    )
    made.log_directory.mkdir(parents=True)
    init_run(made)
    return made


def write(config, key, record):
    producer = Producer(producer_config(config.kafka, "test"))
    producer.produce(Topics(config.run.id).control, record and encode(record), key.encode())
    assert producer.flush(20) == 0


class Running:
    """A supervisor in its own thread, with the roles that a test gives by name and program."""

    def __init__(self, config, programs):
        self.config = config
        self.stop, self.hurry = threading.Event(), threading.Event()
        self.output = io.StringIO()
        self._programs = programs
        self.outcome = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        environment = environment_of(os.environ, 1, 1)
        arguments = [self.config.kafka.bootstrap_servers, self.config.run.id]
        children = [
            Child(
                RoleProcess(name, f"{name}/0", [sys.executable, "-c", program, *arguments]),
                self.config.log_directory,
                environment,
            )
            for name, program in self._programs.items()
        ]
        control = ControlLog(self.config.kafka, Topics(self.config.run.id), "test-up")
        control.read_to_end()
        console = Console(file=self.output, width=200)
        with Screen(self.config, console, time.monotonic()) as screen:
            self.outcome = Supervisor(
                config=self.config,
                children=children,
                control=control,
                screen=screen,
                broker=GivenBroker(self.config.kafka.bootstrap_servers),
                stop=self.stop,
                hurry=self.hurry,
            ).run()
        control.close()

    def ended(self, deadline_s=60):
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), self.output.getvalue()
        return self.outcome

    def pid(self, name, other_than=None):
        """Of the role, once it is published."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid = read_pids(self.config.run_directory).get(name)
            if pid not in (None, other_than):
                return pid
            time.sleep(0.05)
        raise AssertionError(f"{name} has no pid: {self.output.getvalue()}")

    @contextmanager
    def started(self):
        self._thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            self.hurry.set()
            self._thread.join(60)


def test_a_killed_role_starts_again_and_the_run_finishes(config):
    with Running(config, {"one": FOLLOWS, "two": FOLLOWS}).started() as running:
        first = running.pid("one")
        os.kill(first, signal.SIGKILL)
        assert running.pid("one", other_than=first) != first
        write(config, CONTROL_FINISHED, Finished(step=3, at_ms=1))
        outcome = running.ended()
    assert outcome.finished
    assert outcome.exit_codes == {"one": 0, "two": 0}
    assert outcome.restarts == {"one": 1}
    assert "one was killed by SIGKILL" in running.output.getvalue()
    assert set(read_pids(config.run_directory)) == {"up"}


def test_a_role_that_ends_before_the_run_is_started_again(config):
    with Running(config, {"one": "pass", "two": FOLLOWS}).started() as running:
        first = running.pid("one")
        running.pid("one", other_than=first)
        write(config, CONTROL_FINISHED, Finished(step=3, at_ms=1))
        assert running.ended().finished


def test_a_fatal_run_stops_every_role_with_its_message(config):
    with Running(config, {"one": FOLLOWS, "two": FOLLOWS}).started() as running:
        running.pid("two")
        write(config, CONTROL_FATAL, Fatal(role="dispatcher", message="no prompts", at_ms=1))
        outcome = running.ended()
    assert not outcome.finished
    assert outcome.problem == "the dispatcher stopped the run: no prompts"
    assert outcome.exit_codes == {"one": 1, "two": 1}


def test_a_role_that_needs_a_person_stops_the_others_and_shows_its_last_words(config):
    refuses = "import sys, time; time.sleep(2); print('the model is not there'); sys.exit(1)"
    with Running(config, {"one": refuses, "two": UNTIL_TERMINATED}).started() as running:
        outcome = running.ended()
    assert "one cannot go on" in outcome.problem
    assert "the model is not there" in outcome.problem
    assert outcome.exit_codes["two"] == 0


def test_ctrl_c_stops_in_order(config):
    notes = UNTIL_TERMINATED + "import time; print(time.time_ns())"
    with Running(config, {"one": notes, "two": notes, "three": notes}).started() as running:
        running.pid("three")
        time.sleep(2.0)  # the programs must have begun to wait
        running.stop.set()
        outcome = running.ended()
    assert outcome.stopped
    assert not outcome.problem
    times = [
        int((config.log_directory / f"{name}.log").read_text()) for name in ("one", "two", "three")
    ]
    assert times == sorted(times)


def test_a_deaf_role_is_killed_with_what_it_started(config, monkeypatch):
    monkeypatch.setattr(stopping, "STOP_S", 0.5)
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}])\n{DEAF}"
    with Running(config, {"one": starts}).started() as running:
        pid = running.pid("one")
        deadline = time.monotonic() + 20
        while not (family := psutil.Process(pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # until both are deaf
        running.stop.set()
        outcome = running.ended()
    assert outcome.exit_codes == {"one": -9}
    psutil.wait_procs(family, timeout=10)
    assert not [one for one in family if one.is_running() and one.status() != "zombie"]


def test_a_killed_up_leaves_nothing_behind(config, tmp_path):
    """Neither roles nor the broker that it had started."""
    program = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from infra.up.run import Launch, session
        from infra.up.child import Child
        from infra.up.pid_file import write_pids
        from infra.up.roles import RoleProcess, environment_of
        launch = Launch(Path({str(tmp_path / "run.yaml")!r}))
        with session(launch, lambda text: print(text, file=sys.stderr)) as running:
            place = running.config.run_directory
            child = Child(RoleProcess("one", "one/0", [sys.executable, "-c", {DEAF!r}]), place,
                          environment_of(os.environ, 1, 1))
            child.start()
            write_pids(place, {{"one": child.pid, "broker": running.broker.pid or 0}})
            print("up", flush=True)
            time.sleep(600)
    """)
    (tmp_path / "run.yaml").write_text(
        f"run: {{id: killed, directory: {tmp_path}}}\n"
        f"data: {{train_jsonl_fpath: {tmp_path / 'prompts.jsonl'}}}\n"
        "policy: {model_name: none}\n"
        "env: {agents: {sums: {gym: 'a:B'}}}\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        pids = read_pids(tmp_path / "killed")
        assert pids["one"]
        process.kill()
    left = [pid for pid in pids.values() if pid]
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_resume_takes_the_fatal_back(config):
    write(config, CONTROL_FATAL, Fatal(role="trainer", message="no eligible token", at_ms=1))
    notes = []
    session = Session(config, [], GivenBroker(config.kafka.bootstrap_servers))
    assert resume(session, notes.append).message == "no eligible token"
    assert control_state(config).fatal is None
    assert resume(session, notes.append) is None
    assert notes == ["taken back: no eligible token"]
