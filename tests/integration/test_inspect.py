"""`groupstream groups` and `rows` on a real broker, with a real assembler behind it."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, TopicPartition

from tests.assembling import Run, create
from tests.inspected_run import groupstream, told
from tests.rows import execution_of

Tool = Callable[..., Any]


@pytest.fixture
def run(broker: Any, run_id: str, tmp_path: Path) -> Run:
    return create(broker.bootstrap_servers, run_id, tmp_path)


@pytest.fixture
def tool(run: Run) -> Tool:
    return partial(groupstream, run)


@pytest.fixture
def story(run: Run) -> Iterator[Run]:
    with told(run) as story:
        yield story


@pytest.fixture(scope="module")
def read_story(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """For the tests that change nothing of it."""
    name = f"read-story-{uuid.uuid4().hex[:8]}"
    run = create(broker.bootstrap_servers, name, tmp_path_factory.mktemp(name))
    with told(run) as story:
        yield story


@pytest.fixture
def read(read_story: Run) -> Tool:
    return partial(groupstream, read_story)


def fates(history: dict[str, Any]) -> list[tuple[int, int, str]]:
    """(attempt, offset, fate) of the records on the task's partition."""
    home = history["task"] % 2
    return [
        (attempt["attempt"], record["offset"], record["fate"])
        for attempt in history["attempts"]
        for record in attempt["records"]
        if record["partition"] == home
    ]


def test_where_the_tasks_stand(read: Tool) -> None:
    lines = read("groups ls")
    assert {line["task"]: (line["state"], line["rows"]) for line in lines} == {
        0: ("trained", 4),
        1: ("trained", 4),
        2: ("open", 3),
        3: ("abandoned", None),
        4: ("waiting", 1),
        5: ("accepted", 4),
        6: ("open", 2),
        7: ("dispatched", 0),
    }
    assert (lines[1]["attempt"], lines[3]["reason"]) == (1, "attempts_exhausted")
    assert {line["agent"] for line in lines} == {"sums"}
    assert read("groups ls --summary") == [
        {
            "dispatched": 8,
            "accepted": 3,
            "trained": 2,
            "abandoned": {"attempts_exhausted": 1},
            "outstanding": 4,
            "forgotten": 0,
        }
    ]
    assert [line["task"] for line in read("groups ls --state accepted")] == [0, 1, 5]
    assert [line["task"] for line in read("groups ls --target 1")] == [5]
    text = read("groups ls", as_json=False)
    assert "dispatched 8 = accepted 3 (2 trained) + abandoned 1 (attempts_exhausted 1)" in text

    (shown,) = read("groups show 1")
    assert (shown["group"]["attempt"], shown["group"]["execution_id"]) == (1, execution_of(1, 1))
    assert [row["row_index"] for row in shown["group"]["rows"]] == [0, 1, 2, 3]
    assert shown["group"]["rows"][2]["traces"][0]["sampled_tokens"] == 6
    assert shown["group"]["rows"][1]["reward"] == 1.0
    assert "1-2-a1" in read("groups show 1", as_json=False)
    (shown,) = read("groups show 3")
    assert (shown["group"], shown["state"]) == (None, "abandoned")
    assert "it was abandoned: attempts_exhausted" in read("groups show 3", as_json=False)
    for line in ("groups show 8", "rows 8"):
        code, said = read(line, fails=True)
        assert code == 1
        assert "has not dispatched a task 8: its tasks are 0 to 7" in said


def test_what_was_done_with_each_record(read: Tool) -> None:
    (history,) = read("rows 0")
    assert fates(history) == [
        (0, 0, "started"),
        (0, 1, "placed"),
        (0, 2, "placed"),
        (0, 3, "duplicate"),
        (0, 4, "placed"),
        (0, 5, "placed"),
        (0, 6, "late"),
    ]
    (attempt,) = history["attempts"]
    assert (attempt["outcome"], attempt["rows_placed"]) == ("accepted", 4)
    assert attempt["records"][6]["why"] == "the task is settled"
    assert all(record["size_bytes"] > 0 for record in attempt["records"])

    (history,) = read("rows 1")
    failed, accepted = history["attempts"]
    assert [record["fate"] for record in failed["records"]] == [
        *("started", "placed", "failed_attempt")
    ]
    assert (failed["outcome"], failed["reason"]) == ("failed", "gym_error")
    assert failed["records"][2]["why"] == "gym_error: the gym raised"
    assert (accepted["outcome"], accepted["execution_id"]) == ("accepted", execution_of(1, 1))

    (history,) = read("rows 3")
    assert [fate for _, _, fate in fates(history)] == ["placed", "cancelled"]
    assert history["attempts"][0]["outcome"] == "abandoned"

    (history,) = read("rows 4")
    (attempt,) = history["attempts"]
    offender = attempt["records"][1]
    assert (offender["fate"], offender["failed_attempt"]) == ("dead_letter", True)
    assert offender["why"].startswith("conflicting_repeat: ")
    (nameless,) = history["nameless"]  # the tombstone: only its key names the task
    assert nameless["why"].startswith("no_value: ")

    (history,) = read("rows 2")
    stray = history["attempts"][0]["records"][3]
    assert (stray["partition"], stray["row"], stray["fate"]) == (1, 3, "dead_letter")
    assert history["attempts"][0]["outcome"] == "open"
    assert "dead letter" in read("rows 2", as_json=False)
    (history,) = read("rows 7")
    assert [attempt["outcome"] for attempt in history["attempts"]] == ["dispatched"]


def test_rows_that_are_not_there_any_more(story: Run, tool: Tool) -> None:
    """A row that nobody needs is below retention; its event still tells."""
    admin = story.admin()
    deleted = admin.delete_records([TopicPartition(story.topics.rows, 0, 5)])
    for future in deleted.values():
        future.result(30)
    (history,) = tool("rows 0")
    assert fates(history) == [
        (0, 0, "started"),
        (0, 3, "duplicate"),
        (0, 5, "placed"),
        (0, 6, "late"),
    ]
    assert history["attempts"][0]["records"][0]["size_bytes"] is None


def test_events_that_are_not_there_any_more(story: Run, tool: Tool) -> None:
    """`groups` still knows what was accepted; without it only the ledger knows that it ended."""
    delete_all(story, story.topics.events)
    lines = tool("groups ls")
    assert {line["task"]: line["state"] for line in lines if line["task"] % 2 == 0} == {
        0: "trained",
        2: "open",
        4: "waiting",
        6: "open",
    }
    (history,) = tool("rows 6")
    assert [fate for _, _, fate in fates(history)] == ["unknown", "unknown"]
    delete_all(story, story.topics.groups)
    (shown,) = tool("groups show 0")
    assert (shown["state"], shown["group"]) == ("forgotten", None)
    assert tool("groups ls --summary")[0]["forgotten"] == 1


def delete_all(run: Run, topic: str) -> None:
    """Of partition 0."""
    admin = run.admin()
    for future in admin.delete_records([TopicPartition(topic, 0, OFFSET_END)]).values():
        future.result(30)
