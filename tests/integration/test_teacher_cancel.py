"""A complete task that its teacher holds, cancelled before, during and after the flush, and kills.

The dispatcher, the assembler and the broker are real; the test is shard, trainer, teacher, and
whoever cancels. Each task ends once, and a replacement follows `abandoned`.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from schemas import topics as keys
from schemas.codec import encode
from schemas.config import Config
from schemas.records import EventKind, GroupEvent, PromptGroup
from tests.assembling import Run, process
from tests.flush_points import COMMITTED, OFFERED, PRODUCED
from tests.integration.dispatcher_run import G, N, World, config_of, dispatching
from tests.rows import make_cancel, make_row
from tests.teacher_server import Reply, echoed, teacher_server

TERMINAL = (EventKind.ACCEPTED, EventKind.ABANDONED)
FIRST_TARGETS = (0, 1)


class Line:
    """What the test plays: rolls out prompts, cancels, and looks at what came of it."""

    def __init__(self, world: World, config: Config, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.run = Run(config, world.manifest, world.topics)

    @contextmanager
    def assembler(self, *harm: str) -> Iterator["Popen[bytes]"]:
        with process(self.run, self.directory, "a", *harm) as running:
            yield running

    def roll_out(self, prompt: PromptGroup) -> None:
        """Its rows, and one that nobody dispatched."""
        changes: dict[str, Any] = {"target_step": prompt.target_step, "agent": prompt.agent}
        rows = [
            make_row(self.world.manifest, prompt.task_index, i, prompt.attempt, **changes)
            for i in range(G)
        ]
        self.run.send_rows([(prompt.task_index, encode(row)) for row in rows])
        foreign = make_row(self.world.manifest, prompt.task_index, 0, stamp=bytes(8))
        self.run.send_rows([(prompt.task_index, encode(foreign))])

    def cancel(self, prompt: PromptGroup) -> None:
        cancel = make_cancel(self.world.manifest, prompt.task_index, target_step=prompt.target_step)
        self.run.send_rows([(prompt.task_index, encode(cancel))])

    def prompt_of(self, task: int) -> PromptGroup:
        self.world.wait_for(f"task {task}", lambda world: task in world.newest())
        return self.world.newest()[task]

    def end_of(self, task: int) -> GroupEvent:
        self.world.wait_for(f"end of task {task}", lambda _: task in self.ends())
        return self.ends()[task]

    def ends(self) -> dict[int, GroupEvent]:
        return {event.task_index: event for event in self.run.events(*TERMINAL)}

    def waits_for_its_teacher(self) -> None:
        self.world.wait_for(
            "teacher", lambda _: self.run.heartbeat("a").get("groups_with_teacher") == 1
        )

    def replacement_of(self, event: GroupEvent, known: set[int]) -> PromptGroup:
        """A task of the same target that was not dispatched before; only after `event`."""
        self.world.wait_for("replacement", lambda world: set(world.newest()) - known)
        (task,) = set(self.world.newest()) - known
        prompt = self.world.newest()[task]
        assert prompt.target_step == event.target_step
        assert prompt.dispatched_at_ms >= event.at_ms
        return prompt


@pytest.fixture
def answers() -> threading.Event:
    """Set: the teacher answers at once."""
    return threading.Event()


@pytest.fixture
def line(broker: Any, run_id: str, tmp_path: Path, answers: threading.Event) -> Iterator[Line]:
    def answering(request: dict[str, Any]) -> Reply:
        answers.wait(60)
        return echoed(request)

    with teacher_server(answering) as base_url:
        teacher = {"model_name": "t", "base_url": base_url}
        config = config_of(
            broker.bootstrap_servers,
            run_id,
            tmp_path,
            teachers={"models": {"t": teacher}, "default_teacher": "t"},
            kafka={"session_timeout_ms": 2000},
        )
        world = World(config)
        try:
            yield Line(world, config, tmp_path)
        finally:
            answers.set()
            world.close()


def test_a_held_task_that_is_cancelled_ends_once_whatever_dies(
    line: Line, answers: threading.Event
) -> None:
    with dispatching(line.world):
        line.world.publish(0)
        line.world.wait_for_prompts(2 * N)
        cancelled_while_held(line)
        answers.set()
        for task, point in ((1, PRODUCED), (2, OFFERED), (3, COMMITTED)):
            killed_at(line, task, point)
        with line.assembler():
            roll_out_the_rest(line)
            accepted = next(e for e in line.ends().values() if e.kind is EventKind.ACCEPTED)
            known = set(line.world.newest())
            line.cancel(line.prompt_of(accepted.task_index))  # too late
            time.sleep(1)
            assert set(line.world.read().newest()) == known
        check_books(line)


def cancelled_while_held(line: Line) -> None:
    """Before the flush: the answer never comes; the crash follows the cancel's flush."""
    known = set(line.world.newest())
    with line.assembler() as assembler:
        line.roll_out(line.prompt_of(0))
        line.waits_for_its_teacher()
        line.cancel(line.prompt_of(0))
        event = line.end_of(0)
        assert event.kind is EventKind.ABANDONED
        line.replacement_of(event, known)
        assembler.kill()


def killed_at(line: Line, task: int, point: str) -> None:
    """The cancel is read by the successor, after the group's rows."""
    known = set(line.world.newest())
    with line.assembler("kill", point) as assembler:
        line.roll_out(line.prompt_of(task))
        line.world.wait_for(f"death at {point}", lambda _: assembler.poll() is not None)
    line.cancel(line.prompt_of(task))
    with line.assembler():
        event = line.end_of(task)
        if point == COMMITTED:
            assert event.kind is EventKind.ACCEPTED
        else:
            assert event.kind is EventKind.ABANDONED
            line.replacement_of(event, known)


def roll_out_the_rest(line: Line) -> None:
    """Until both targets are full."""
    left = [p for task, p in line.world.newest().items() if task not in line.ends()]
    for prompt in left:
        line.roll_out(prompt)
    for prompt in left:
        assert line.end_of(prompt.task_index).kind is EventKind.ACCEPTED


def check_books(line: Line) -> None:
    ends = Counter(event.task_index for event in line.run.events(*TERMINAL))
    assert set(ends.values()) == {1}
    targets = Counter(group.target_step for group in line.run.groups())
    assert targets == dict.fromkeys(FIRST_TARGETS, N)
    assert len({group.task_index for group in line.run.groups()}) == 2 * N
    origins = [
        tuple(dict(letter.headers())[name] for name in (keys.DLQ_PARTITION, keys.DLQ_OFFSET))
        for letter in line.run.dead_letters()
    ]
    assert len(origins) == len(set(origins)) == len(ends)  # one with each roll-out
    totals = line.world.ledger().totals
    abandoned = sum(totals.abandoned.values())
    assert totals.dispatched == len(ends) == totals.accepted + abandoned
