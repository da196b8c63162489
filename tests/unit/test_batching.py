"""Which groups a step takes, and where a restart reads again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import GroupsContradict
from schemas.identity import partition_of
from schemas.records import AssembledGroup, Purpose
from trainer.batching import GroupRead, WaitingGroups

PARTITIONS = 3
N = 3


def group(task: int, step: int, **changes: Any) -> AssembledGroup:
    fields: dict[str, Any] = {
        "run_id": "run",
        "task_index": task,
        "attempt": 0,
        "group_size": 2,
        "target_step": step,
        "stamp": bytes(8),
        "execution_id": "execution",
        "generation_version": step,
        "accepted_at_ms": 1,
        "rows": [],
    }
    return AssembledGroup(**fields | changes)


def log_of(groups: list[AssembledGroup]) -> list[list[GroupRead]]:
    """Each partition of `groups` when these were accepted in this order."""
    partitions: list[list[GroupRead]] = [[] for _ in range(PARTITIONS)]
    for each in groups:
        partition = partition_of(each.task_index, PARTITIONS)
        # a gap of one after each record: the marker of its transaction
        offset = 2 * len(partitions[partition])
        partitions[partition].append(GroupRead(partition, offset, each))
    return partitions


def start(step: int = 0, positions: dict[int, int] | None = None) -> WaitingGroups:
    return WaitingGroups(step, positions or dict.fromkeys(range(PARTITIONS), 0))


def train_all(waiting: WaitingGroups, reads: list[GroupRead]) -> dict[int, list[int]]:
    """The tasks of each step that these reads complete, trained as soon as they are here."""
    steps: dict[int, list[int]] = {}
    for read in reads:
        waiting.add(read)
        while (taken := waiting.take(N)) is not None:
            steps[waiting.next_step] = [each.task_index for each in taken]
            waiting.trained()
    return steps


@st.composite
def accepted(draw: st.DrawFn) -> list[AssembledGroup]:
    """The groups of some steps and a few validation groups, in any order of acceptance."""
    steps = draw(st.integers(1, 4))
    tasks = [group(task, task // N) for task in range(steps * N)]
    numbers = range(steps * N, steps * N + draw(st.integers(0, 3)))
    checks = [group(task, 0, purpose=Purpose.VALIDATION) for task in numbers]
    return draw(st.permutations(tasks + checks))


def any_interleaving(draw: st.DrawFn, partitions: list[list[GroupRead]]) -> list[GroupRead]:
    queues = [list(partition) for partition in partitions]
    reads = []
    while any(queues):
        reads.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return reads


@given(st.data())
def test_any_order_of_arrival_gives_the_same_batches(data):
    groups = data.draw(accepted())
    reads = any_interleaving(data.draw, log_of(groups))
    last = max(each.target_step for each in groups)
    expected = {step: list(range(step * N, (step + 1) * N)) for step in range(last + 1)}
    assert train_all(start(), reads) == expected


@given(st.data())
def test_a_restart_at_the_offsets_trains_what_was_not_trained(data):
    groups = data.draw(accepted())
    partitions = log_of(groups)
    reads = any_interleaving(data.draw, partitions)
    read_before = data.draw(st.integers(0, len(reads)))
    waiting = start()
    steps = train_all(waiting, reads[:read_before])

    offsets = waiting.offsets()
    again = start(waiting.next_step, offsets)
    kept = [[r for r in partition if r.offset >= offsets[r.partition]] for partition in partitions]
    rest = train_all(again, any_interleaving(data.draw, kept))
    assert steps | rest == train_all(start(), reads)
    assert not steps.keys() & rest.keys()


@given(st.data())
def test_offsets_are_the_lowest_untrained_else_the_position(data):
    groups = data.draw(accepted())
    reads = any_interleaving(data.draw, log_of(groups))
    waiting = start()
    for count, read in enumerate(reads):
        train_all(waiting, [read])
        for partition in range(PARTITIONS):
            seen = [r for r in reads[: count + 1] if r.partition == partition]
            position = seen[-1].offset + 1 if seen else 0
            untrained = [
                r.offset
                for r in seen
                if r.group.purpose is Purpose.TRAIN and r.group.target_step >= waiting.next_step
            ]
            assert waiting.offsets()[partition] == min(untrained, default=position)


def test_a_short_step_takes_as_many_as_its_target_says():
    waiting = start()
    waiting.add(GroupRead(0, 0, group(0, 0)))
    assert waiting.take(2) is None
    assert [each.task_index for each in waiting.take(1)] == [0]


def test_an_empty_target_takes_nothing_and_leaves_the_others():
    waiting = start()
    waiting.add(GroupRead(1, 0, group(1, 1)))
    assert waiting.take(0) == []
    waiting.trained()
    assert waiting.arrived() == [1]
    assert len(waiting) == 1


def test_validation_groups_and_trained_ones_are_passed():
    waiting = start(step=5)
    waiting.add(GroupRead(0, 3, group(0, 4)))
    waiting.add(GroupRead(1, 7, group(1, 5, purpose=Purpose.VALIDATION)))
    assert waiting.passed == {"trained": 1, "validation": 1}
    assert waiting.offsets() == {0: 4, 1: 8, 2: 0}
    assert len(waiting) == 0


def test_a_task_that_stands_twice_is_an_error_with_both_places():
    waiting = start()
    waiting.add(GroupRead(0, 4, group(3, 0)))
    with pytest.raises(GroupsContradict, match=r"task 3 .* offset 4 \(attempt 0\).*offset 6"):
        waiting.add(GroupRead(0, 6, group(3, 0, attempt=1)))


def test_more_groups_than_the_step_takes_is_an_error():
    waiting = start()
    for task in range(3):
        waiting.add(GroupRead(task, 0, group(task, 0)))
    with pytest.raises(GroupsContradict, match=r"step 0 takes 2 groups.*\[0, 1, 2\]"):
        waiting.take(2)
