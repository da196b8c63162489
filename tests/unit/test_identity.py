import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import identity

_TASKS = st.integers(0, 2**40)
_PARTITIONS = st.integers(1, 64)


@given(_TASKS, _PARTITIONS)
def test_partition_and_ordinal_name_the_task(task, num_partitions):
    partition = identity.partition_of(task, num_partitions)
    ordinal = identity.ordinal_of(task, num_partitions)
    assert identity.task_of(ordinal, partition, num_partitions) == task


@given(st.integers(0, 500), st.integers(1, 9))
def test_the_initial_watermark_is_the_first_task_of_the_partition(first, num_partitions):
    for partition in range(num_partitions):
        tasks = [t for t in range(first, first + num_partitions) if t % num_partitions == partition]
        expected = identity.ordinal_of(tasks[0], num_partitions)
        assert identity.initial_watermark(partition, num_partitions, first) == expected


@pytest.mark.parametrize("changed", ["task_index", "attempt", "target_step", "group_size"])
def test_a_stamp_depends_on_every_part(changed):
    parts = {"task_index": 1, "attempt": 2, "target_step": 3, "group_size": 4}
    stamp = identity.stamp(b"k" * 32, "run", **parts)
    assert len(stamp) == identity.STAMP_BYTES
    assert identity.stamp(b"k" * 32, "run", **parts | {changed: 9}) != stamp
    assert identity.stamp(b"x" * 32, "run", **parts) != stamp
    assert identity.stamp(b"k" * 32, "other", **parts) != stamp


@pytest.mark.parametrize(
    ("attempt", "supplied", "expected"),
    [(0, None, "7-3"), (2, None, "7-3-a2"), (0, "abc.1", "abc.1"), (1, "abc", "abc-a1")],
)
def test_rollout_ids(attempt, supplied, expected):
    assert identity.rollout_id(7, 3, attempt, supplied) == expected


@pytest.mark.parametrize("supplied", ["", "../x", "-a", "a b"])
def test_a_supplied_rollout_id_must_be_path_safe(supplied):
    with pytest.raises(ValueError, match="does not match"):
        identity.rollout_id(1, 0, 0, supplied)
