"""Which attempts are believed lost, and when silence does not count."""

from typing import Any

import pytest

from producers.liveness import DEADLINE_GRACE_S, Liveness
from schemas.records import Heartbeat, LedgerTask, RunningAttempt, TaskState
from tests.unit.test_ledger import task_of

OWN = "own"
DEADLINE_S = 300.0


class World:
    """Advances a clock in steps, with the heartbeats that are given."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.liveness = Liveness(OWN, DEADLINE_S, self.now_s)
        self.tasks: list[LedgerTask] = [task_of(0, seq=4)]
        self.beats: dict[str, Heartbeat] = {}
        self.echoes = True
        self.lost: list[tuple[int, str]] = []

    def beat(self, incarnation: str, *, replica: int = 0, committed: int = -1, **rest: Any) -> None:
        """From now on `gym/<replica>` beats like this, once a second."""
        self.beats[f"gym/{replica}"] = heartbeat(
            "gym-shard",
            f"gym/{replica}",
            incarnation,
            committed_seq={"0": committed} if committed >= 0 else {},
            **rest,
        )

    def silence(self, replica: int = 0) -> None:
        del self.beats[f"gym/{replica}"]

    def start(self, *, live: bool = True, replica: int = 0) -> None:
        self.liveness.started(self.tasks[0], f"gym/{replica}", now_s=self.now_s, live=live)

    def wait(self, seconds: int) -> list[tuple[int, str]]:
        """What was found lost meanwhile."""
        before = len(self.lost)
        for _ in range(seconds):
            self.now_s += 1
            for beat in self.beats.values():
                self.liveness.heard(beat, now_s=self.now_s, now_ms=0)
            if self.echoes:
                own = heartbeat("dispatcher", "0", OWN)
                self.liveness.heard(own, now_s=self.now_s, now_ms=500)
            found = self.liveness.failures(self.tasks, self.now_s)
            self.lost += [(lost.task.attempt, lost.reason) for lost in found]
        return self.lost[before:]


def heartbeat(role: str, instance: str, incarnation: str, **changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "role": role, "instance": instance, "incarnation": incarnation, "pid": 1, "host": "h",
        "at_ms": 0, "loop_at_ms": 0, "doing": "", "doing_since_ms": 0,
    }  # fmt: skip
    return Heartbeat(**fields | changes)


def running(task_index: int = 0, attempt: int = 0) -> list[RunningAttempt]:
    return [
        RunningAttempt(
            task_index=task_index, attempt=attempt, rows_done=0, group_size=4, started_at_ms=0
        )
    ]


@pytest.fixture
def world() -> World:
    world = World()
    world.beat("a", committed=4)
    world.wait(1)
    return world


def test_a_started_attempt_of_a_silent_shard_is_lost_once(world):
    world.start()
    assert world.wait(5) == []
    world.silence()
    assert world.wait(10) == []
    assert world.wait(30) == [(0, "shard_lost")]


def test_a_started_attempt_of_a_replaced_process_is_lost(world):
    world.start()
    world.wait(2)
    world.beat("b")
    assert world.wait(1) == [(0, "shard_lost")]


def test_a_prompt_that_waits_for_its_shard_is_not_lost():
    world = World()
    world.beat("a", committed=3)
    world.wait(1)
    world.silence()
    assert world.wait(60) == []
    world.beat("b", committed=3)
    assert world.wait(60) == []


def test_a_taken_prompt_that_neither_started_nor_runs_is_lost(world):
    assert world.wait(2) == []
    assert world.wait(5) == [(0, "lost_start")]


def test_a_prompt_that_runs_is_not_lost(world):
    world.beat("a", committed=4, running=running())
    assert world.wait(50) == []
    world.beat("a", committed=4)  # its rows are all sent, and the assembler is behind
    assert world.wait(9) == []


def test_another_replica_may_run_it(world):
    world.beat("c", replica=1, committed=4, running=running())
    assert world.wait(30) == []
    world.silence(replica=1)
    assert world.wait(12) == [(0, "shard_lost")]


def test_a_start_from_before_this_process_is_no_proof_that_it_runs(world):
    world.start(live=False)
    assert world.wait(12) == [(0, "lost_start")]


def test_a_shard_that_was_gone_before_this_process_is_noticed():
    world = World()
    world.beat("a", committed=4, running=running())
    world.wait(1)
    world.silence()
    assert world.wait(12) == [(0, "shard_lost")]


def test_the_deadline_counts_from_the_start(world):
    world.beat("a", committed=4, running=running())
    world.start()
    assert world.wait(int(DEADLINE_S + DEADLINE_GRACE_S)) == []
    assert world.wait(2) == [(0, "deadline")]


def test_silence_does_not_count_while_our_own_heartbeats_do_not_come_back(world):
    world.start()
    world.silence()
    world.wait(8)
    world.echoes = False
    assert world.wait(60) == []
    world.echoes = True
    assert world.wait(10) == []
    assert world.wait(2) == [(0, "shard_lost")]


def test_an_old_heartbeat_of_our_own_proves_nothing(world):
    world.start()
    world.silence()
    world.echoes = False
    for _ in range(30):
        own = heartbeat("dispatcher", "0", OWN)
        world.liveness.heard(own, now_s=world.now_s, now_ms=3_001)
        assert world.wait(1) == []


def test_a_heartbeat_from_before_our_clock_was_set_back_proves_nothing(world):
    world.start()
    world.silence()
    world.echoes = False
    for _ in range(30):
        own = heartbeat("dispatcher", "0", OWN)
        world.liveness.heard(own, now_s=world.now_s, now_ms=own.at_ms - 3_600_000)
        assert world.wait(1) == []


def test_silence_does_not_count_across_a_pause_of_this_process(world):
    world.start()
    world.silence()
    world.wait(1)
    world.now_s += 30
    assert world.wait(10) == []
    assert world.wait(3) == [(0, "shard_lost")]


def test_the_next_attempt_begins_anew(world):
    world.start()
    world.wait(1)
    world.beat("b", committed=4)
    assert world.wait(1) == [(0, "shard_lost")]
    world.tasks = [task_of(0, seq=5, attempt=1)]
    assert world.wait(30) == []
    world.beat("b", committed=5)
    assert world.wait(12) == [(1, "lost_start")]


def test_tasks_that_wait_or_are_cancelled_have_no_attempt_out(world):
    world.tasks = [task_of(0, seq=4, state=state) for state in TaskState if state != "dispatched"]
    assert world.wait(60) == []
