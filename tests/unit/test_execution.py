import asyncio
import logging

import pytest

from producers import gym_stream
from producers.execution import Execution, Replica
from producers.generation.generation import GenerationFailed
from producers.gyms.protocol import RolloutResult
from producers.row import RowOptions
from producers.row_sink import DeliveryFailed
from schemas.errors import RecordTooLarge
from schemas.records import AttemptFailed, ExecutionStarted, RolloutRow, Trace
from schemas.validation import check_row
from schemas.vectors import logprob_bytes, logprobs
from tests.prompts import make_group
from tests.rows import make_manifest, make_trace

MANIFEST = make_manifest()
HANGS = object()


class ListSink:
    """Keeps what a broker would have; a row of more than `limit` tokens is too large for it."""

    def __init__(self, *, limit=1000, delivers=True, takes_s=0.0):
        self.records = []
        self.limit, self.delivers, self.takes_s = limit, delivers, takes_s

    async def send(self, record):
        if isinstance(record, RolloutRow):
            check_row(record)
            if len(record.traces[0].token_ids) > 4 * self.limit:
                raise RecordTooLarge(f"{len(record.traces[0].token_ids)} bytes, {self.limit}")
        await asyncio.sleep(self.takes_s)
        self.records.append(record)
        delivery = asyncio.get_running_loop().create_future()
        if self.delivers:
            delivery.set_result(None)
        else:
            delivery.set_exception(DeliveryFailed("the broker is gone"))
        return delivery


class ScriptedGym:
    """Plays a list: a row index, an item, an exception to raise, a time to sleep, or HANGS."""

    agents = ("sums",)

    def __init__(self, *script):
        self.script = script
        self.closed = False

    async def run(self, group):
        try:
            for step in self.script:
                if isinstance(step, BaseException):
                    raise step
                if step is HANGS:
                    await asyncio.Event().wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield (step, result(f"r{step}"), None) if isinstance(step, int) else step
        finally:
            self.closed = True


def result(name="r", **changes):
    fields = {"reward": 1.0, "traces": [make_trace(name)], "version_start": 0}
    return RolloutResult(**fields | changes)


def execute(gym, sink=None, **changes):
    """(what run() gave, the records that were sent)"""
    sink = sink or ListSink()

    async def main():
        group = make_group(MANIFEST, 7, **changes)
        execution = Execution(group, gym, sink, Replica("left", 1), RowOptions(), version=4)
        ended = await asyncio.wait_for(execution.run(), 10)
        assert execution.running().rows_done == execution.rows_done
        return ended

    return asyncio.run(main()), sink.records


def failure(records):
    """The last record, after checking that it is the only failure and that the start is first."""
    assert isinstance(records[0], ExecutionStarted)
    assert [type(r) for r in records].count(AttemptFailed) == 1
    assert records[-1].execution_id == records[0].execution_id
    assert "task 7 attempt 0, agent sums on left/1" in records[-1].message
    return records[-1]


def test_a_complete_group_is_sent_in_completion_order_with_timing_on_the_last():
    gym = ScriptedGym(2, 0, 3, (1, result("r1"), {"run": 2.0}))
    complete, records = execute(gym)
    assert complete
    assert isinstance(records[0], ExecutionStarted)
    assert (records[0].version_start, records[0].shard, records[0].replica) == (4, "left", 1)
    rows = records[1:]
    assert [row.row_index for row in rows] == [2, 0, 3, 1]
    assert [row.timing for row in rows] == [None, None, None, {"run": 2.0}]
    assert {row.execution_id for row in rows} == {records[0].execution_id}
    assert gym.closed


def test_each_row_is_sent_before_the_next_is_done():
    sink = ListSink()
    seen = []

    class Watching(ScriptedGym):
        async def run(self, group):
            for index in range(4):
                yield index, result(f"r{index}"), None
                await asyncio.sleep(0.02)
                seen.append(len(sink.records) - 1)

    assert execute(Watching(), sink)[0]
    assert seen[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("gym", "reason", "failure_class", "words", "rows"),
    [
        (ScriptedGym(0, KeyError("lost")), "gym_error", "infra", "KeyError: 'lost'", 1),
        (ScriptedGym(GenerationFailed("data", "too long")), "gym_error", "data", "too long", 0),
        (ScriptedGym(GenerationFailed("infra", "ended")), "gym_error", "infra", "ended", 0),
        (ScriptedGym(0, asyncio.CancelledError()), "gym_error", "infra", "cancelled its run", 1),
        (ScriptedGym(0, 4), "gym_protocol", "data", "row 4, expected are 0..3", 1),
        (ScriptedGym(0, -1), "gym_protocol", "data", "row -1", 1),
        (ScriptedGym(("0", result(), None)), "gym_protocol", "data", "row '0'", 0),
        (ScriptedGym((True, result(), None)), "gym_protocol", "data", "row True", 0),
        (ScriptedGym(0, 1, 0), "gym_protocol", "data", "row 0 twice", 2),
        (ScriptedGym(3, 1), "gym_protocol", "data", "without rows [0, 2]", 2),
        (ScriptedGym((0, {"reward": 1}, None)), "gym_protocol", "data", "expected is (row", 0),
        (ScriptedGym((0, result(), {"run": 1.0})), "gym_protocol", "data", "timing with row 0", 0),
        (ScriptedGym((0, result(reward=float("nan")), None)), "row_rejected/reward", "data",
         "reward is nan", 0),
        (ScriptedGym((0, result(traces=[]), None)), "row_rejected/traces", "data", "no traces", 0),
        (ScriptedGym((0, result(traces=[make_trace(tokens=2000)]), None)), "too_large", "data",
         "8000 bytes, 1000", 0),
    ],
)  # fmt: skip
def test_a_failed_row_fails_its_attempt(gym, reason, failure_class, words, rows):
    complete, records = execute(gym)
    failed = failure(records)
    assert not complete
    assert (failed.reason, failed.failure_class) == (reason, failure_class)
    assert words in failed.message
    assert len(records) == rows + 2
    assert gym.closed or not gym.script


def test_a_nan_logprob_never_leaves_the_shard():
    good = make_trace("r0")
    values = logprobs(good.generation_logprobs).copy()
    values[-1] = float("nan")
    bad = Trace(
        trace_id="r0",
        model_call_ids=good.model_call_ids,
        token_ids=good.token_ids,
        generation_logprobs=logprob_bytes(values),
        sampled_spans=good.sampled_spans,
    )
    _, records = execute(ScriptedGym((0, result(traces=[bad]), None)))
    failed = failure(records)
    assert failed.reason == "row_rejected/generation_logprobs"
    assert "row 0" in failed.message
    assert len(records) == 2


def test_a_bad_prompt_fails_before_the_gym_runs():
    gym = ScriptedGym(0, 1, 2, 3)
    _, records = execute(gym, rows=[{}, {}])
    assert failure(records).reason == "bad_prompt"
    assert not gym.closed


def test_a_hanging_gym_is_overdue_and_ended():
    gym = ScriptedGym(0, HANGS)
    _, records = execute(gym, deadline_s=0.1)
    failed = failure(records)
    assert (failed.reason, failed.failure_class) == ("deadline", "infra")
    assert "not done within its 0.1 s" in failed.message
    assert gym.closed


def test_a_gym_that_ignores_its_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(gym_stream, "STOP_S", 0.05)
    released = asyncio.Event()

    class Stubborn(ScriptedGym):
        async def run(self, group):
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    asyncio.get_running_loop().call_later(0.3, released.set)
            yield 0, result(), None

    _, records = execute(Stubborn(), deadline_s=0.05)
    assert failure(records).reason == "deadline"
    assert "ignores its cancellation" in caplog.text


def test_waiting_for_kafka_does_not_count_against_the_deadline():
    complete, records = execute(ScriptedGym(0, 1, 2, 3), ListSink(takes_s=0.2), deadline_s=0.1)
    assert complete
    assert len(records) == 5


def test_an_error_after_the_last_row_is_only_logged(caplog):
    with caplog.at_level(logging.WARNING):
        complete, records = execute(ScriptedGym(0, 1, 2, 3, ValueError("after")))
    assert complete
    assert len(records) == 5
    assert "after" in caplog.text


def test_a_broker_that_takes_nothing_is_no_failure_of_the_attempt():
    with pytest.raises(DeliveryFailed, match="gone"):
        execute(ScriptedGym(0, 1, 2, 3), ListSink(delivers=False))


def test_a_cancelled_attempt_says_nothing_and_closes_its_gym():
    gym, sink = ScriptedGym(0, HANGS), ListSink()

    async def main():
        execution = Execution(
            make_group(MANIFEST, 7), gym, sink, Replica("left", 1), RowOptions(), version=0
        )
        task = asyncio.create_task(execution.run())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()

    asyncio.run(main())
    assert [type(record) for record in sink.records] == [ExecutionStarted, RolloutRow]
    assert gym.closed


def test_a_gym_may_keep_timeouts_and_task_groups_open_between_rows():
    class Grouped(ScriptedGym):
        async def run(self, group):
            done = asyncio.Queue()
            async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
                for index in range(4):
                    tasks.create_task(done.put(index))
                for _ in range(4):
                    index = await done.get()
                    yield index, result(f"r{index}"), None

    complete, records = execute(Grouped())
    assert complete
    assert len(records) == 5


def test_attempts_do_not_disturb_each_other():
    sink = ListSink()

    async def main():
        gyms = [ScriptedGym(0, ValueError("x")), ScriptedGym(0, 0.05, 1, 2, 3)]
        runs = [
            Execution(
                make_group(MANIFEST, task), gym, sink, Replica("left", 0), RowOptions(), version=0
            ).run()
            for task, gym in enumerate(gyms)
        ]
        return await asyncio.gather(*runs)

    assert asyncio.run(main()) == [False, True]
    assert sorted(
        r.row_index for r in sink.records if r.task_index == 1 and isinstance(r, RolloutRow)
    ) == [0, 1, 2, 3]
