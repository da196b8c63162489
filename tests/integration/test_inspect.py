"""`groupstream dlq`, `groups` and `rows` on a real broker, with a real assembler behind it."""

import os
import pty
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition

from infra.inspection.letters import Letter, Resolution, is_mark
from infra.inspection.pictures import letters_of
from infra.inspection.reading import RunReader
from infra.inspection.resolver import Replay, Resolver
from infra.monitor.record_counter import LetterCounter
from schemas import topics as keys
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.errors import Fenced
from schemas.records import EventKind
from tests.assembling import Run, create, wait_for
from tests.inspected_run import groupstream, told
from tests.rows import (
    execution_of,
    make_row,
)
from tests.run import finish, read_topic, send

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


def test_letters_are_listed_and_opened(read_story: Run, read: Tool, tmp_path: Path) -> None:
    letters = read("dlq list")
    assert sorted(letter["reason"] for letter in letters) == [
        *("conflicting_repeat", "no_value", "unknown_schema", "wrong_partition")
    ]
    assert read("dlq list --summary")[0]["letters"] == 4
    (stray,) = read("dlq list --reason wrong_partition")
    assert (stray["task"], stray["attempt"], stray["row"]) == (2, 0, 3)
    assert (stray["origin_partition"], stray["partition"]) == (1, 1)
    assert read("dlq list --task 2") == [stray]
    assert "wrong_partition 1" in read("dlq list", as_json=False)
    value = tmp_path / "value"
    (shown,) = read(f"dlq show {stray['partition']} {stray['offset']} --value-to {value}")
    assert value.read_bytes() == encode(make_row(read_story.manifest, 2, 3))
    assert shown["decoded"]["traces"][0]["token_ids"]["count"] == 8
    assert "its partition is 0" in shown["message"]
    (noise,) = read("dlq list --reason unknown_schema")
    (shown,) = read(f"dlq show {noise['partition']} {noise['offset']}")
    assert (shown["decoded"], bytes.fromhex(shown["hex"])) == (None, b"not avro")
    assert "not avro" in read(f"dlq show 0 {noise['offset']}", as_json=False)
    code, said = read("dlq show 0 1000", fails=True)
    assert (code, "has no record at offset 1000" in said) == (1, True)


def test_a_row_that_went_astray_is_replayed_and_its_group_completes(story: Run, tool: Tool) -> None:
    (stray,) = tool("dlq list --reason wrong_partition")
    where = f"{stray['partition']} {stray['offset']}"
    (resolved,) = tool(f"dlq replay {where}")
    assert (resolved["resolution"], resolved["replayed_partition"]) == ("replayed", 0)
    wait_for("the group of task 2", lambda: len(story.groups()) == 4)
    (shown,) = tool("groups show 2")
    assert [row["row_index"] for row in shown["group"]["rows"]] == [0, 1, 2, 3]
    (history,) = tool("rows 2")
    records = {(r["partition"], r["offset"]): r for r in history["attempts"][0]["records"]}
    copy = records[0, resolved["replayed_offset"]]
    assert (copy["row"], copy["fate"]) == (3, "placed")
    assert records[1, stray["origin_offset"]]["resolution"] == "replayed"
    assert tool("dlq list --reason wrong_partition") == []
    (again,) = tool("dlq list --reason wrong_partition --all")
    assert again == resolved | {"resolved_at_ms": again["resolved_at_ms"]}
    code, said = tool(f"dlq replay {where}", fails=True)
    assert code == 1
    assert "is already replayed as offset" in said
    assert len(story.groups()) == 4

    tool(f"dlq replay {where} --again")  # the task is settled: the assembler's rule decides
    wait_for("a late row", lambda: any(e.task_index == 2 for e in story.events(EventKind.LATE)))
    assert len(story.groups()) == 4


def test_what_is_dropped_is_hidden_and_what_is_bad_comes_back(story: Run, tool: Tool) -> None:
    (dropped,) = tool("dlq drop --reason no_value --yes")
    assert dropped["resolution"] == "dropped"
    assert tool("dlq drop --reason no_value --yes") == []
    (noise,) = tool("dlq replay --reason unknown_schema")
    assert noise["replayed_partition"] == 0
    wait_for("another letter", lambda: len(letters_in(story)) == 5)
    (new,) = tool("dlq list --reason unknown_schema")
    assert new["origin_offset"] == noise["replayed_offset"]
    assert len(tool("dlq list --all")) == 5
    assert len(tool("dlq list")) == 3
    resolved = tool("dlq replay --all")
    assert len(resolved) == 3
    # every record in `dlq` is a mark, or has a reason and a unique origin
    wait_for("what is bad again", lambda: len(tool("dlq list --reason unknown_schema")) == 1)
    headers = [dict(letter.headers()) for letter in letters_in(story)]
    origins = [(h[keys.DLQ_PARTITION], h[keys.DLQ_OFFSET]) for h in headers]
    assert len(set(origins)) == len(origins)
    assert all(h[keys.DLQ_REASON] for h in headers)


def letters_in(run: Run) -> list[Any]:
    return [letter for letter in run.dead_letters() if not is_mark(letter.headers())]


def test_nothing_is_replayed_into_a_run_that_has_finished(run: Run, tool: Tool) -> None:
    finish(run.config)
    code, said = tool("dlq replay --all", fails=True)
    assert (code, "has finished" in said) == (1, True)


def test_a_terminal_is_asked_before_letters_are_dropped(run: Run, tool: Tool) -> None:
    send(run.config, run.topics.dlq, [(1, None, b"one")])
    assert tool("dlq list --summary") == [{"letters": 1, "reasons": {"unlabelled": 1}}]
    file = Path(run.config.run.directory) / "config.yaml"
    command = [
        sys.executable,
        "-m",
        "infra.cli.main",
        "dlq",
        "drop",
        "--all",
        "--config",
        str(file),
    ]
    terminal, its_end = pty.openpty()
    os.write(terminal, b"n\n")
    result = subprocess.run(command, stdin=its_end, check=True, timeout=60, capture_output=True)
    os.close(terminal)
    os.close(its_end)
    assert b"Mark as dropped: letters 1 = unlabelled 1?" in result.stderr
    assert b"dropped: letters 0" in result.stdout
    assert tool("dlq list --summary")[0]["letters"] == 1


def test_marks_are_not_counted_as_letters(run: Run, tool: Tool) -> None:
    send(run.config, run.topics.dlq, [(0, None, b"one"), (0, None, b"two"), (1, None, b"three")])
    tool("dlq drop 0 1")
    assert len(run.dead_letters()) == 4
    with closing(LetterCounter(run.config.kafka, run.topics.dlq, 2)) as counter:
        assert counter.counts() == {0: 2, 1: 1}


class Died(Exception):
    pass


def test_a_tool_that_dies_leaves_both_or_neither(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are written, its mark is not: the next tool ends that transaction."""
    send(run.config, run.topics.dlq, [(0, None, b"one"), (0, None, b"two")])
    with RunReader(run.config) as reader:
        first, second = letters_of(reader, 0)
        dying = Resolver(run.config.kafka, run.topics)

        def die(*_: Any) -> Letter:
            raise Died

        with monkeypatch.context() as patch:
            patch.setattr(dying, "_mark", die)
            with pytest.raises(Died):
                dying.replay([Replay(first, None, b"one", 0)])
        assert read_topic(run.config, run.topics.rows, "read_uncommitted") != []
        with closing(Resolver(run.config.kafka, run.topics)) as successor:
            assert [letter.mark for letter in letters_of(reader, 0, written=True)] == [None, None]
            assert read_topic(run.config, run.topics.rows) == []
            with pytest.raises(Fenced, match="another tool opened"):
                dying.drop([first])
            (resolved,) = successor.drop([second])
        assert resolved.mark is not None
        after = letters_of(reader, 0, written=True)
        assert [letter.mark and letter.mark.resolution for letter in after] == [
            *(None, Resolution.DROPPED)
        ]


def test_a_mark_above_an_open_transaction_is_not_missed(run: Run) -> None:
    """The assembler's open transaction hides what another producer committed after it began."""
    send(run.config, run.topics.dlq, [(0, None, b"one")])
    slow = Producer(producer_config(run.config.kafka, "slow", f"{run.config.run.id}.slow"))
    slow.init_transactions(30)
    slow.begin_transaction()
    slow.produce(run.topics.dlq, b"of the assembler", partition=0)
    assert slow.flush(30) == 0
    with RunReader(run.config) as reader:
        (letter,) = letters_of(reader, 0)
        with closing(Resolver(run.config.kafka, run.topics)) as resolver:
            resolver.drop([letter])
        assert letters_of(reader, 0)[0].mark is None
        ending = threading.Timer(1.0, slow.commit_transaction)
        ending.start()
        first, second = letters_of(reader, 0, written=True)
        ending.join()
    assert first.mark is not None
    assert second.mark is None
