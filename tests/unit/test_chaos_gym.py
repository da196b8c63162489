"""The scripted gym: an attempt is the same whenever it runs, and its rows pass the shard's gate."""

import asyncio

import pytest

from producers.gyms.protocol import RolloutRequest
from tests.chaos import gym
from tests.chaos.gym import FAILS_ALWAYS, FAILS_ONCE, ChaosGym, ScriptedError

G = 4


@pytest.fixture
def run(tmp_path):
    version = tmp_path / "version"
    version.write_text("5")
    chaos = ChaosGym(("sums",), None, {"sums": {"seed": 7, "version_file": str(version)}})

    def rows_of(task_index, attempt=0):
        request = RolloutRequest(
            task_index=task_index,
            attempt=attempt,
            agent="sums",
            rows=[{}] * G,
            rollout_ids=[f"{task_index}-{row}" for row in range(G)],
            deadline_s=10.0,
        )

        async def collected():
            return [item async for item in chaos.run(request)]

        return asyncio.run(collected())

    return rows_of


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(gym, "ROW_S", 0.0)
    monkeypatch.setattr(gym, "SLOW_S", 0.0)


def outcome(run, task_index, attempt):
    try:
        return run(task_index, attempt)
    except ScriptedError:
        return "failed"


def test_an_attempt_gives_the_same_rows_each_time(run):
    assert run(3) == run(3)
    assert run(3, 1) != run(3, 0)


def test_rows_come_once_each_in_any_order_with_timing_at_the_last(run):
    orders = set()
    for task_index in range(10):
        items = run(task_index)
        indices = [index for index, _, _ in items]
        orders.add(tuple(indices))
        assert sorted(indices) == list(range(G))
        assert [timing is not None for _, _, timing in items] == [False] * (G - 1) + [True]
    assert len(orders) > 1


def test_versions_are_the_newest_but_for_a_few_that_are_stale(run):
    versions = []
    for task_index in range(1500):
        if (items := outcome(run, task_index, 0)) != "failed":
            versions += {result.version_start for _, result, _ in items}
    assert set(versions) == {5, 3}
    assert versions.count(5) > 1450


def test_few_fail_at_first_and_fewer_always(run):
    first = [task for task in range(1000) if outcome(run, task, 0) == "failed"]
    always = [task for task in first if outcome(run, task, 1) == "failed"]
    assert 0 < len(always) < len(first) < 1000 * 3 * (FAILS_ONCE + FAILS_ALWAYS)
