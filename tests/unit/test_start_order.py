from hypothesis import given
from hypothesis import strategies as st

from producers.start_order import Prompt, StartOrder
from tests.prompts import make_group
from tests.rows import make_manifest

MANIFEST = make_manifest()


def prompt(partition, offset, *, task, **changes):
    group = make_group(MANIFEST, task, target_step=changes.pop("target_step", 0), **changes)
    return Prompt(partition, offset, 0, group)


def take(order, version=0, running=0, runs_alone=False):
    taken = order.take(version=version, running=running, runs_alone=runs_alone)
    return None if taken is None else taken.group.task_index


def test_a_partition_starts_in_offset_order_and_the_oldest_target_goes_first():
    order = StartOrder(8)
    order.add(prompt(0, 0, task=9, target_step=2))
    order.add(prompt(0, 1, task=1, target_step=0))
    order.add(prompt(1, 0, task=5, target_step=1))
    assert [take(order) for _ in range(4)] == [5, 9, 1, None]


def test_a_prompt_that_waits_for_a_policy_holds_its_own_partition_only():
    order = StartOrder(8)
    order.add(prompt(0, 0, task=1, min_version=3))
    order.add(prompt(0, 1, task=2))
    order.add(prompt(1, 0, task=4))
    assert [take(order), take(order)] == [4, None]
    assert order.awaited_version() == 3
    assert [take(order, version=3), take(order, version=3)] == [1, 2]


def test_no_start_without_a_slot():
    order = StartOrder(2)
    order.add(prompt(0, 0, task=1))
    assert take(order, running=2) is None
    assert take(order, running=1) == 1


def test_a_lonely_prompt_drains_the_replica_and_keeps_it():
    order = StartOrder(8)
    order.add(prompt(0, 0, task=1, alone=True, target_step=9))
    order.add(prompt(1, 0, task=2))
    assert take(order, running=1) is None
    assert take(order, running=0) == 1
    assert take(order, running=1, runs_alone=True) is None
    assert take(order, running=0) == 2


def test_a_dropped_partition_is_forgotten():
    order = StartOrder(8)
    order.add(prompt(0, 0, task=1))
    order.add(prompt(1, 0, task=2))
    order.drop(0)
    assert [take(order), take(order)] == [2, None]
    assert len(order) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.booleans()),
        max_size=25,
    )
)
def test_everything_starts_once_in_its_partitions_order(given_prompts):
    order, offsets = StartOrder(3), dict.fromkeys(range(4), 0)
    for task, (partition, target, min_version, alone) in enumerate(given_prompts):
        order.add(
            prompt(
                partition,
                offsets[partition],
                task=task,
                target_step=target,
                min_version=min_version,
                alone=alone,
            )
        )
        offsets[partition] += 1
    started = []
    for version in range(3):
        while (taken := order.take(version=version, running=0, runs_alone=False)) is not None:
            assert taken.group.min_version <= version
            started.append(taken)
    assert len(started) == len(given_prompts)
    for partition in range(4):
        own = [taken.offset for taken in started if taken.partition == partition]
        assert own == sorted(own)
