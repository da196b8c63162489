"""`groupstream dlq` on a real broker, with a real assembler behind it."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from infra.inspection import pictures, resolver
from infra.inspection.errors import NothingWritten
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
from tests.rows import make_row
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


def test_letters_are_listed_and_opened(story: Run, tool: Tool, tmp_path: Path) -> None:
    letters = tool("dlq list")
    assert sorted(letter["reason"] for letter in letters) == [
        *("conflicting_repeat", "no_value", "unknown_schema", "wrong_partition")
    ]
    assert tool("dlq list --summary")[0]["letters"] == 4
    (stray,) = tool("dlq list --reason wrong_partition")
    assert (stray["task"], stray["attempt"], stray["row"]) == (2, 0, 3)
    assert (stray["origin_partition"], stray["partition"]) == (1, 1)
    assert tool("dlq list --task 2") == [stray]
    assert "wrong_partition 1" in tool("dlq list", as_json=False)
    value = tmp_path / "value"
    (shown,) = tool(f"dlq show {stray['partition']} {stray['offset']} --value-to {value}")
    assert value.read_bytes() == encode(make_row(story.manifest, 2, 3))
    assert shown["decoded"]["traces"][0]["token_ids"]["count"] == 8
    assert "its partition is 0" in shown["message"]
    (noise,) = tool("dlq list --reason unknown_schema")
    (shown,) = tool(f"dlq show {noise['partition']} {noise['offset']}")
    assert (shown["decoded"], bytes.fromhex(shown["hex"])) == (None, b"not avro")
    assert "not avro" in tool(f"dlq show 0 {noise['offset']}", as_json=False)
    code, said = tool("dlq show 0 1000", fails=True)
    assert (code, "has no record at offset 1000" in said) == (1, True)


def test_a_letter_deleted_between_two_reads_is_opened_all_the_same(
    run: Run, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(run.config, run.topics.dlq, [(0, None, b"one")])
    monkeypatch.setattr(pictures, "letters_of", lambda *_: [])
    (shown,) = tool("dlq show 0 0")
    assert (shown["reason"], bytes.fromhex(shown["hex"])) == ("unlabelled", b"one")


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
        written = read_topic(run.config, run.topics.rows, "read_uncommitted")
        assert b"one" in [message.value() for message in written]
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


def test_a_tool_that_cannot_settle_aborts_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one can."""

    def refused(producer: Producer, places: Any, *_: Any) -> None:
        producer.begin_transaction()
        for topic, partition in places:
            producer.produce(topic, b"settling", partition=partition)
        assert producer.flush(30) == 0
        raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, "refused"))

    with monkeypatch.context() as patch:
        patch.setattr(resolver, "settle", refused)
        with pytest.raises(NothingWritten, match=r"could not be ended.*refused"):
            Resolver(run.config.kafka, run.topics)
    for topic in (run.topics.rows, run.topics.dlq):
        # Its abort is written: what comes after it can be read.
        send(run.config, topic, [(0, None, b"after"), (1, None, b"after")])
        wait_for("both", lambda topic=topic: len(read_topic(run.config, topic)) == 2)
    with closing(Resolver(run.config.kafka, run.topics)):
        pass
