"""The dispatcher against a real broker; the test plays everybody else."""

import random
import threading
import time
from collections import Counter
from contextlib import closing

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from producers.dispatcher import run
from producers.transactions import Transactions
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.errors import DatasetError, Fenced, ManifestMismatch, RunStopped
from schemas.records import AttemptFailed, CancelRequested, EventKind, FailedBy, LedgerTotals
from schemas.topics import LEDGER_TOTALS
from tests.integration.dispatcher_run import (
    PATIENCE_S,
    G,
    N,
    Process,
    World,
    config_of,
    dispatching,
    write_prompts,
)
from tests.rows import make_stamp


@pytest.fixture
def make_world(broker, run_id, tmp_path):
    worlds = []

    def make(**changes):
        world = World(config_of(broker.bootstrap_servers, run_id, tmp_path, **changes))
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.close()


def test_fills_the_window_and_follows_the_policy(make_world):
    world = make_world()
    with dispatching(world) as dispatcher:
        world.stays_quiet()
        world.publish(0)
        prompts = world.wait_for_prompts(2 * N)
        assert [(p.task_index, p.target_step, p.rowidx_start) for p in prompts] == [
            (0, 0, 0), (1, 0, G), (2, 1, 0), (3, 1, G),
        ]  # fmt: skip
        for prompt in prompts:
            assert prompt.stamp == make_stamp(
                world.manifest, prompt.task_index, 0, prompt.target_step, G
            )
            (row,) = [orjson.loads(payload) for payload in prompt.rows]
            assert row["_ng_task_index"] == prompt.task_index
            assert prompt.shard == {"sums": "one", "products": "two"}[prompt.agent]
        world.stays_quiet()
        for task in range(N):
            world.say(EventKind.ACCEPTED, task)
        world.publish(1)
        assert [p.target_step for p in world.wait_for_prompts(3 * N)[2 * N :]] == [2, 2]
        world.wait_for("next task", lambda w: w.controlled().next_task_index == 3 * N)
        world.wait_for("offsets", lambda w: w.committed_events() == 2)
        assert not dispatcher.done()
    assert world.ledger().totals.accepted == N


def test_a_failed_attempt_is_repeated_after_its_backoff_then_cancelled_and_replaced(make_world):
    world = make_world(env={"agents": AGENTS, "max_attempts": 2})
    with dispatching(world):
        world.publish(0)
        world.wait_for_prompts(2 * N)
        began_s = time.monotonic()
        world.say(EventKind.ATTEMPT_FAILED, 0, reason="gym_error", message="first")
        world.wait_for_prompts(2 * N + 1)
        assert time.monotonic() - began_s >= 1.0
        assert world.newest()[0].attempt == 1
        world.say(EventKind.ATTEMPT_FAILED, 0, attempt=0, reason="gym_error")
        world.stays_quiet()
        world.say(EventKind.ATTEMPT_FAILED, 0, reason="gym_error")
        world.wait_for("cancel", lambda w: w.requests)
        (cancel,) = world.requests
        assert isinstance(cancel, CancelRequested)
        assert (cancel.cohort, cancel.reason) == ((0, 1), "gym_error")
        world.stays_quiet()
        world.say(EventKind.ABANDONED, 0, reason=cancel.reason)
        fresh = world.wait_for_prompts(2 * N + 2)[-1]
        assert (fresh.task_index, fresh.target_step, fresh.rowidx_start) == (4, 0, 0)
    totals = world.ledger().totals
    assert (totals.dispatched, totals.abandoned) == (5, {"gym_error": 1})


AGENTS = {"sums": {"gym": "a:B"}, "products": {"gym": "a:B"}}


def test_a_restart_asks_for_its_cancels_again(make_world):
    world = make_world(env={"agents": AGENTS, "max_attempts": 1})
    for life in range(2):
        with dispatching(world):
            world.publish(0)
            world.wait_for_prompts(2 * N)
            if life == 0:
                world.say(EventKind.ATTEMPT_FAILED, 1, reason="deadline")
            world.wait_for("cancel", lambda w, life=life: len(w.requests) == life + 1)
    assert world.requests[0] == world.requests[1]


def test_a_stale_group_is_sent_again_and_counts_as_no_failure(make_world):
    world = make_world()
    with dispatching(world):
        world.publish(0)
        world.wait_for_prompts(2 * N)
        for attempt in (1, 2):
            world.say(EventKind.ATTEMPT_FAILED, 2, reason="stale")
            world.wait_for_prompts(2 * N + attempt)
            assert world.newest()[2].attempt == attempt
        assert world.ledger().tasks[2].failures == 0


def test_kill_9_again_and_again_leaves_no_hole_and_no_double(make_world, tmp_path):
    """The dispatcher is killed at random moments while a whole run goes by."""
    write_prompts(tmp_path / "prompts.jsonl", 23)
    world = make_world(grpo=GRPO | {"max_num_epochs": 2})
    chance = random.Random(7)
    dispatcher = Process(world.config, tmp_path)
    ended: dict[int, EventKind] = {}
    version, kills = 0, 0
    world.publish(version)
    until_s = time.monotonic() + 150
    next_kill_s = time.monotonic() + 3
    while True:
        assert time.monotonic() < until_s, (version, world.control.state, len(world.prompts))
        state = world.read().control.state
        if state.last_target is not None and version > state.last_target:
            break
        alive = sorted(world.newest().keys() - ended.keys())
        if alive:
            task = chance.choice(alive)
            kind = chance.choices(KINDS, weights=(6, 1, 1))[0]
            world.say(kind, task, reason="stale" if kind is EventKind.ATTEMPT_FAILED else "")
            if kind is not EventKind.ATTEMPT_FAILED:
                ended[task] = kind
        there = sum(
            kind is EventKind.ACCEPTED and world.newest()[task].target_step == version
            for task, kind in ended.items()
        )
        if there == state.targets.get(version, N):
            version += 1
            world.publish(version)
        if kills < 4 and time.monotonic() > next_kill_s:
            dispatcher.kill()
            kills += 1
            dispatcher = Process(world.config, tmp_path)
            next_kill_s = time.monotonic() + chance.uniform(2, 4)
        time.sleep(chance.uniform(0.05, 0.3))
    world.finish(version)
    assert dispatcher.end() == 0
    world.read()
    assert kills >= 2
    assert Counter(p.cohort for p in world.prompts).most_common(1)[0][1] == 1
    newest = world.newest()
    assert sorted(newest) == list(range(2 * 23))
    numbers = Counter(orjson.loads(prompt.rows[0])["number"] for prompt in newest.values())
    assert numbers == dict.fromkeys(range(23), 2)
    ledger = world.ledger()
    kinds = Counter(ended.values())
    assert ledger.totals.dispatched == 46
    assert ledger.totals.accepted == kinds[EventKind.ACCEPTED]
    assert ledger.abandoned == kinds[EventKind.ABANDONED]
    assert ledger.tasks == {}
    assert_dense_sequences(world)


KINDS = (EventKind.ACCEPTED, EventKind.ABANDONED, EventKind.ATTEMPT_FAILED)
GRPO = {
    "num_prompts_per_step": N,
    "num_generations_per_prompt": G,
    "async_grpo": {"enabled": True, "max_generation_failures": 99},
}


def assert_dense_sequences(world: World) -> None:
    """Sequence numbers are dense in each prompts partition that the ledger counts."""
    sent: dict[str, list[int]] = {}
    for prompt in world.prompts:
        sent.setdefault(prompt.shard, []).append(prompt.seq)
    for shard, numbers in sent.items():
        lengths = [n for key, n in world.ledger().totals.next_seq.items() if key.startswith(shard)]
        expected = [seq for length in lengths for seq in range(length)]
        assert sorted(numbers) == sorted(expected)


def test_an_aborted_transaction_did_not_happen(make_world, monkeypatch):
    """Commits fail now and then, and each time the state is read again."""
    world = make_world()
    turns = iter([True, True, False, True] + [False] * 100)
    finish = Transactions._finish

    def failing(self, name, call):
        if name == "commit" and next(turns):
            raise KafkaException(KafkaError(KafkaError._FAIL, "told to", False, False, True))
        finish(self, name, call)

    monkeypatch.setattr(Transactions, "_finish", failing)
    with dispatching(world):
        world.publish(0)
        world.wait_for_prompts(2 * N)
        world.say(EventKind.ACCEPTED, 0)
        world.say(EventKind.ACCEPTED, 1)
        world.publish(1)
        prompts = world.wait_for_prompts(3 * N)
        world.stays_quiet()
    assert [p.task_index for p in prompts] == list(range(3 * N))
    assert world.ledger().totals.accepted == N
    assert next(turns) is False, "all failures were used"


def test_what_a_dead_predecessor_left_open_did_not_happen(make_world):
    world = make_world()
    name = world.topics.transactional_id("dispatcher")
    dead = Producer(producer_config(world.config.kafka, "dead", name))
    dead.init_transactions(PATIENCE_S)
    dead.begin_transaction()
    totals = LedgerTotals(next_task_index=99)
    dead.produce(world.topics.dispatch, encode(totals), LEDGER_TOTALS.encode(), partition=0)
    dead.flush(PATIENCE_S)
    with dispatching(world):
        world.publish(0)
        assert [p.task_index for p in world.wait_for_prompts(2 * N)] == [0, 1, 2, 3]
        with pytest.raises(KafkaException) as late:
            dead.commit_transaction(PATIENCE_S)
        assert late.value.args[0].fatal()


def test_too_many_failures_stop_the_run(make_world):
    world = make_world(grpo=GRPO | {"async_grpo": {"enabled": True}})
    with dispatching(world, RunStopped) as dispatcher:
        world.publish(0)
        world.wait_for_prompts(2 * N)
        world.say(EventKind.ABANDONED, 1, reason="too_large")
        error = dispatcher.exception(PATIENCE_S)
    for text in ("task 1 of agent", "(too_large)", "1 in a row"):
        assert text in str(error)
    state = world.controlled()
    assert state.fatal is not None
    assert state.fatal.role == "dispatcher"
    assert len(world.read().prompts) == 2 * N, "nothing is sent after it"
    with pytest.raises(RunStopped):
        run(world.config, stop=threading.Event())


def test_the_end_of_the_data_is_declared_and_the_run_finishes(make_world, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3)
    world = make_world()
    with dispatching(world) as dispatcher:
        world.publish(0)
        world.wait_for_prompts(3)
        world.wait_for("last target", lambda w: w.control.state.last_target == 1)
        assert world.control.state.targets == {1: 1}
        world.say(EventKind.ABANDONED, 0, reason="too_large")
        world.wait_for("smaller target", lambda w: w.control.state.targets == {0: 1, 1: 1})
        world.finish(2)
        dispatcher.result(PATIENCE_S)


def test_a_second_dispatcher_fences_the_first(make_world):
    world = make_world()
    with dispatching(world, Fenced) as first:
        world.publish(0)
        world.wait_for_prompts(2 * N)
        with dispatching(world) as second:
            world.wait_for("second dispatcher", lambda w: w.dispatchers_at_work() == 2)
            world.say(EventKind.ACCEPTED, 0)
            world.say(EventKind.ACCEPTED, 1)
            world.publish(1)
            assert "another process opened" in str(first.exception(PATIENCE_S))
            world.wait_for_prompts(3 * N)
            world.stays_quiet()
            assert not second.done()
    assert len(world.prompts) == 3 * N


def test_a_silent_shard_fails_its_started_attempts_by_request(make_world):
    world = make_world()
    with dispatching(world):
        world.publish(0)
        world.wait_for_prompts(2 * N)
        taken = world.newest()[0]
        with closing(Beating(world, taken)) as beating:
            world.say(EventKind.STARTED, 0, shard=taken.shard, replica=taken.replica)
            world.stays_quiet(4)
            beating.incarnation = "second"
            world.wait_for("request", lambda w: w.requests)
    (request,) = world.requests
    assert isinstance(request, AttemptFailed)
    assert (request.cohort, request.by, request.reason) == (
        (0, 0), FailedBy.DISPATCHER, "shard_lost",
    )  # fmt: skip
    assert request.stamp == taken.stamp


class Beating:
    """The heartbeat of the shard that took a prompt."""

    def __init__(self, world, prompt):
        self.incarnation = "first"
        self._world = world
        self._instance = f"{prompt.shard}/{prompt.replica}"
        self._task = prompt.task_index
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def close(self):
        self._stopped.set()
        self._thread.join()

    def _beat(self):
        while not self._stopped.wait(0.5):
            running = [self._task] if self.incarnation == "first" else []
            self._world.beat(self._instance, self.incarnation, {}, running)


def test_a_wrong_dataset_stops_the_start_before_anyone_is_fenced(make_world, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        '{"responses_create_params": {}, "agent_ref": {"name": "chess"}}\n'
    )
    world = make_world()
    with pytest.raises(DatasetError, match=r"agent 'chess' is not hosted .*: lines 1"):
        run(world.config, stop=threading.Event())


def test_another_dataset_than_the_runs_is_refused(make_world, tmp_path):
    world = make_world()
    write_prompts(tmp_path / "prompts.jsonl", 5)
    with pytest.raises(ManifestMismatch, match="SHA-256"):
        run(world.config, stop=threading.Event())
