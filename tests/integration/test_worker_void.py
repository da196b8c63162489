"""A transaction that can't succeed: the assembler ends with the reason, and loses nothing."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from consumers import worker
from schemas.errors import GroupstreamError
from schemas.records import EventKind
from tests.assembling import Run, assembler, assert_whole, shuffled_rows, wait_for

ANSWER_S = 30.0
GIVES_UP_S = 60.0
TASKS = 20


def limit_groups(run: Run, size_bytes: int) -> None:
    """As an operator might, after the run was created."""
    size = ConfigEntry(
        "max.message.bytes", str(size_bytes), incremental_operation=AlterConfigOpType.SET
    )
    topic = ConfigResource(ResourceType.TOPIC, run.topics.groups, incremental_configs=[size])
    admin = run.admin()
    admin.incremental_alter_configs([topic])[topic].result(ANSWER_S)


def ended_by_itself(run: Run) -> BaseException | None:
    """What an assembler raised within GIVES_UP_S."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.run, run.config, instance="a", stop=stop)
        try:
            return running.exception(GIVES_UP_S)
        finally:
            stop.set()


def test_a_topic_that_refuses_a_group_ends_the_assembler_and_loses_nothing(
    new_run: Callable[..., Run],
) -> None:
    run = new_run()
    sent = shuffled_rows(run.manifest, range(TASKS), tokens=512)
    limit_groups(run, 2000)
    run.send_rows(sent)
    error = ended_by_itself(run)
    assert isinstance(error, GroupstreamError), error
    assert "in a row" in str(error)
    assert "Message size too large" in str(error)
    assert run.topics.groups in str(error)
    assert run.groups() == []
    limit_groups(run, 10_000_000)
    with assembler(run, "a") as running:
        wait_for("every record's end", run.is_drained, running)
    assert_whole(run, run.groups(), sent)
    accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
    assert sorted(accepted) == list(range(TASKS))
