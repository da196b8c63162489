"""The trainer against a real broker: steps, kill -9, fencing, short and empty steps, the end."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from schemas.config import KafkaConfig
from schemas.errors import Fenced, OffsetsLost, RunStopped
from schemas.records import (
    CheckpointRecorded,
    Fatal,
    Finished,
    Heartbeat,
    LastTarget,
    LedgerTask,
    NextTaskIndex,
    PolicyVersion,
    Purpose,
    TargetSize,
)
from schemas.topics import Topics
from tests.integration.trainer_runs import TrainerRun, new_run, wait_for
from tests.unit.tiny_models import make_qwen2
from trainer.loop import run
from trainer.publishing import ControlPublisher, Interrupted

LAST = 5
MASKED_STEP, SHORT_STEP = 1, 4
TASKS = {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7], 4: [8], 5: [9, 10]}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_qwen2(tmp_path_factory.mktemp("models") / "tiny", num_attention_heads=2)


@pytest.fixture
def one_run(broker, run_id, model, tmp_path) -> TrainerRun:
    return new_run(broker.bootstrap_servers, run_id, model, tmp_path / "run")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def send_all(trainer_run: TrainerRun, steps: list[int]) -> None:
    """The groups of `steps`, in this order of steps, and what the dispatcher says about them."""
    topics = trainer_run.topics
    for step in steps:
        tasks = reversed(TASKS[step])  # the later task arrives first
        trainer_run.send_groups(
            trainer_run.group(task, step, masked=step == MASKED_STEP) for task in tasks
        )
    if SHORT_STEP in steps:
        size = TargetSize(target_step=SHORT_STEP, groups=1)
        trainer_run.send(topics.control, f"target/{SHORT_STEP}", size)
    if LAST in steps:
        trainer_run.send(topics.control, "last_target", LastTarget(target_step=LAST))


def versions(trainer_run: TrainerRun) -> list[int]:
    records = [record for _, record in trainer_run.records(trainer_run.topics.control)]
    return [record.version for record in records if isinstance(record, PolicyVersion)]


def newest(trainer_run: TrainerRun, kind: type):
    records = [record for _, record in trainer_run.records(trainer_run.topics.control)]
    return [record for record in records if isinstance(record, kind)][-1]


def weights_of(trainer_run: TrainerRun) -> dict[str, bytes]:
    """The safetensors of each kept version."""
    directories = sorted(trainer_run.config.weights_directory.iterdir())
    return {
        path.name.split("-")[0]: (path / "model.safetensors").read_bytes() for path in directories
    }


def run_beside(trainer_run: TrainerRun, act: Callable[[threading.Event], None]) -> None:
    """The trainer in this thread; `act` in another one, which may set the trainer's stop."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def acting() -> None:
        try:
            act(stop)
        except BaseException as error:
            failures.append(error)
            stop.set()

    thread = threading.Thread(target=acting, daemon=True)
    thread.start()
    try:
        run(trainer_run.config, stop=stop)
    finally:
        thread.join(20)
        assert failures == []


@pytest.mark.timeout(400)
def test_a_killed_trainer_ends_with_the_weights_of_an_undisturbed_one(
    broker, run_id, model, tmp_path
):
    quiet = new_run(broker.bootstrap_servers, f"{run_id}-q", model, tmp_path / "quiet")
    quiet.send_groups([quiet.group(100, 0, purpose=Purpose.VALIDATION)])
    quiet.send(quiet.topics.control, "next_task_index", NextTaskIndex(task_index=11))
    send_all(quiet, [1, 0, 3, 2, 5, 4])
    # Both in processes of their own: bits depend on the threads that another library may set.
    assert quiet.process(tmp_path / "quiet").wait(120) == 0
    assert {line["step"]: line["tasks"] for line in quiet.metrics()} == TASKS
    assert len(quiet.metrics()) == len(TASKS)
    assert versions(quiet) == list(range(LAST + 2))

    killed = new_run(broker.bootstrap_servers, f"{run_id}-k", model, tmp_path / "killed")
    killed.send(killed.topics.control, "next_task_index", NextTaskIndex(task_index=11))
    send_all(killed, [0, 1, 2, 3, 4])
    process = killed.process(tmp_path / "killed")
    try:
        wait_for("step 4", lambda: len(killed.metrics()) == LAST, process)
    finally:
        process.kill()
        process.wait()
    assert newest(killed, CheckpointRecorded).step == 3
    assert not [r for _, r in killed.records(killed.topics.control) if isinstance(r, Finished)]
    send_all(killed, [5])
    assert killed.process(tmp_path / "killed").wait(120) == 0

    again = [(line["step"], line["tasks"]) for line in killed.metrics()]
    assert again == [(step, TASKS[step]) for step in (0, 1, 2, 3, 4, 3, 4, 5)]
    assert versions(killed) == list(range(LAST + 2))
    assert newest(killed, Finished).step == LAST + 1
    assert weights_of(killed) == weights_of(quiet)
    values = weights_of(quiet)
    assert values["v000006"] != values["v000005"]
    assert_lines_agree(quiet, killed)
    assert_ends_are_forgotten(killed)


def assert_lines_agree(quiet: TrainerRun, killed: TrainerRun) -> None:
    """Retrained or not, a step has the same figures."""
    figures = ("loss", "grad_norm", "reward_mean", "eligible_tokens", "logprob_error_max")
    expected = {line["step"]: [line.get(name) for name in figures] for line in quiet.metrics()}
    for line in killed.metrics():
        assert [line.get(name) for name in figures] == expected[line["step"]]
    first, masked = quiet.metrics()[:2]
    assert first["loss"] != 0
    assert first["reward"].keys() == {"sums", "products"}
    assert (first["staleness"], first["rows"], first["zero_update"]) == (0.0, 8, 0.0)
    assert (masked["zero_update"], masked["eligible_tokens"], masked["reward_mean"]) == (1, 0, None)


def assert_ends_are_forgotten(trainer_run: TrainerRun) -> None:
    """Two checkpoints stay, and of `groups` what the older one needs."""
    checkpoints = sorted(trainer_run.config.checkpoint_directory.iterdir())
    assert [path.name.split("-")[0] for path in checkpoints] == ["step_000003", "step_000006"]
    recorded = newest(trainer_run, CheckpointRecorded)
    assert recorded.directory == str(checkpoints[-1])
    assert recorded.next_task_index == 11
    # tasks 0..5 were trained: three in each partition
    assert trainer_run.first_offsets() == {0: 3, 1: 3}
    assert recorded.offsets == {"0": 6, "1": 5}


def test_a_newer_trainer_fences_this_one(one_run):
    def take_over(stop: threading.Event) -> None:
        wait_for("version 0", lambda: versions(one_run) == [0])
        ControlPublisher(one_run.config.kafka, one_run.topics, stop).take_over()
        send_all(one_run, [0])

    with pytest.raises(Fenced, match="newer trainer"):
        run_beside(one_run, take_over)
    assert versions(one_run) == [0]
    assert one_run.metrics() == []

    # what the fenced one exported was never announced: the next trainer removes it
    orphan = [path.name for path in one_run.config.weights_directory.iterdir()]
    assert sorted(name.split("-")[0] for name in orphan) == ["v000000", "v000001"]

    def stop_after_a_step(stop: threading.Event) -> None:
        wait_for("step 0", lambda: len(one_run.metrics()) == 1)
        stop.set()

    run_beside(one_run, stop_after_a_step)
    kept = {path.name for path in one_run.config.weights_directory.iterdir()}
    assert len(kept) == 2
    assert set(orphan) - kept == {name for name in orphan if name.startswith("v000001")}


def test_it_says_for_whom_it_waits_and_stops_at_once(one_run):
    def act(stop: threading.Event) -> None:
        one_run.send(one_run.topics.dispatch, "1", ledger_task(1))
        one_run.send_groups([one_run.group(0, 0)])
        text = "step 0: 1 of 2 groups; waiting for task 1 (shard sums/2, attempt 3"
        wait_for("the name of task 1", lambda: text in doing(one_run))
        stop.set()

    run_beside(one_run, act)
    assert doing(one_run) == "ended"
    assert one_run.metrics() == []


def ledger_task(index: int) -> LedgerTask:
    return LedgerTask(
        task_index=index,
        attempt=3,
        target_step=0,
        epoch=0,
        position=0,
        agent="sums",
        shard="sums",
        replica=2,
        partition=0,
        seq=0,
        min_version=0,
        rowidx_start=0,
        dispatched_at_ms=0,
    )


def doing(trainer_run: TrainerRun) -> str:
    lines = [record for key, record in trainer_run.records(trainer_run.topics.status)]
    beats = [record for record in lines if isinstance(record, Heartbeat)]
    return beats[-1].doing if beats else ""


def test_ten_zero_updates_in_a_row_are_fatal(one_run):
    for step in range(10):
        empty = TargetSize(target_step=step, groups=0)
        one_run.send(one_run.topics.control, f"target/{step}", empty)
    with pytest.raises(RunStopped, match="10 steps in a row had no token to train"):
        run(one_run.config, stop=threading.Event())
    assert newest(one_run, Fatal).role == "trainer"
    assert [line["tasks"] for line in one_run.metrics()] == [[]] * 10
    assert versions(one_run)[-1] == 10
    with pytest.raises(RunStopped, match="stopped by the trainer"):
        run(one_run.config, stop=threading.Event())


def test_groups_that_are_gone_are_an_error_with_both_offsets(one_run):
    def stop_at_the_checkpoint(stop: threading.Event) -> None:
        send_all(one_run, [0, 1, 2])
        wait_for(
            "checkpoint 3",
            lambda: any(
                isinstance(record, CheckpointRecorded) and record.step == 3
                for _, record in one_run.records(one_run.topics.control)
            ),
        )
        stop.set()

    run_beside(one_run, stop_at_the_checkpoint)
    recorded = newest(one_run, CheckpointRecorded)
    ahead = CheckpointRecorded(
        step=3,
        directory=recorded.directory,
        offsets={"0": 99, "1": 3},
        next_task_index=6,
        recorded_at_ms=1,
    )
    one_run.send(one_run.topics.control, "checkpoint", ahead)
    with pytest.raises(OffsetsLost, match=r"offset 99 of .*groups partition 0, which has 0 to 3"):
        run(one_run.config, stop=threading.Event())


@pytest.mark.timeout(400)
def test_two_ranks_train_what_one_trains(broker, run_id, model, tmp_path):
    def prepared(name: str, ranks: int) -> TrainerRun:
        megatron = {"optimizer": {"lr": 1e-2, "min_lr": 0.0}, "data_parallel_size": ranks}
        made = new_run(
            broker.bootstrap_servers,
            f"{run_id}-{ranks}",
            model,
            tmp_path / name,
            policy={"megatron_cfg": megatron},
        )
        send_all(made, [0, 2])
        made.send(made.topics.control, "target/1", TargetSize(target_step=1, groups=0))
        made.send(made.topics.control, "last_target", LastTarget(target_step=2))
        return made

    one, two = prepared("one", 1), prepared("two", 2)
    run(one.config, stop=threading.Event())
    process = two.process(tmp_path / "two", ranks=2)
    try:
        assert process.wait(300) == 0, (tmp_path / "two" / "trainer.log").read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(20)
    assert [line["tasks"] for line in two.metrics()] == [TASKS[0], [], TASKS[2]]
    assert versions(two) == [0, 1, 2, 3]
    for alone, together in zip(one.metrics(), two.metrics(), strict=True):
        assert together["eligible_tokens"] == alone["eligible_tokens"]
        for name in ("loss", "grad_norm"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


def test_a_stop_ends_the_wait_for_a_silent_broker():
    stop = threading.Event()
    stop.set()
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(Interrupted, match="init_transactions"):
        ControlPublisher(nobody, Topics("nobody"), stop).take_over()
    assert time.monotonic() - began < 8
