"""Datasets are checked whole, ordered the same way after a restart, and read on demand."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from producers.dataset import Dataset
from producers.prompts import Prompter
from schemas.errors import DatasetError
from tests.rows import make_manifest, make_stamp
from tests.unit.test_ledger import task_of

HOSTED = {"sums": "left", "products": "right"}
G = 2


def row(agent: str = "sums", **fields: Any) -> dict[str, Any]:
    reference = {"type": "responses_api_agents", "name": agent}
    return {"responses_create_params": {"input": "1+1"}, "agent_ref": reference, **fields}


def written(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def opened(path: Path, **changes: Any) -> Dataset:
    settings: dict[str, Any] = {
        "group_size": G,
        "shard_of_agent": HOSTED,
        "seed": 1,
        "shuffle": False,
        "max_prompt_bytes": 1 << 20,
    }
    return Dataset.open(path, **settings | changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def error_of(file: Path, *lines: Any, **changes: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        opened(written(file, *lines), **changes)
    return str(caught.value)


def test_each_line_is_a_prompt_and_blank_lines_are_none(file):
    dataset = opened(written(file, row(answer="ü"), "", row("products", answer=2)))
    assert len(dataset) == 2
    assert [dataset.agent_of(0, position) for position in range(2)] == ["sums", "products"]
    assert dataset.rows_of(0, 1) == [row("products", answer=2)]
    assert dataset.rows_of(5, 0) == [row(answer="ü")]


def test_the_last_line_needs_no_newline(file):
    file.write_text(json.dumps(row()) + "\n" + json.dumps(row(answer=2)))
    assert opened(file).rows_of(0, 1) == [row(answer=2)]


def test_lines_with_one_task_index_are_one_prompt_in_rollout_order(file):
    def member(task: int, rollout: int) -> dict[str, Any]:
        return row(_ng_task_index=task, _ng_rollout_index=rollout)

    lines = [member(7, 1), row(answer=2), member(3, 0), member(7, 0), member(3, 1)]
    dataset = opened(written(file, *lines))
    assert len(dataset) == 3
    assert dataset.rows_of(0, 0) == [member(7, 0), member(7, 1)]
    assert dataset.rows_of(0, 1) == [row(answer=2)]
    assert dataset.rows_of(0, 2) == [member(3, 0), member(3, 1)]


def test_rows_of_a_group_without_rollout_index_keep_the_files_order(file):
    lines = [row(_ng_task_index=0, n=n) for n in range(2)]
    assert [r["n"] for r in opened(written(file, *lines)).rows_of(0, 0)] == [0, 1]


def test_a_single_line_with_a_task_index_is_repeated(file):
    assert len(opened(written(file, row(_ng_task_index=9))).rows_of(0, 0)) == 1


def test_the_order_differs_by_epoch_and_seed_and_is_the_same_again(file):
    path = written(file, *(row(n=n) for n in range(20)))

    def order(seed: int, epoch: int) -> list[int]:
        dataset = opened(path, shuffle=True, seed=seed)
        return [dataset.rows_of(epoch, position)[0]["n"] for position in range(20)]

    orders = {(seed, epoch): order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)}
    assert all(sorted(numbers) == list(range(20)) for numbers in orders.values())
    assert len({tuple(numbers) for numbers in orders.values()}) == 4
    assert order(1, 0) == orders[1, 0]


def test_the_order_of_a_seed_is_frozen(file):
    dataset = opened(written(file, *(row(n=n) for n in range(8))), shuffle=True, seed=42)
    numbers = [dataset.rows_of(0, position)[0]["n"] for position in range(8)]
    assert numbers == [7, 2, 5, 0, 6, 3, 4, 1]


def test_one_error_has_every_wrong_line_agent_and_the_hosted_ones(file):
    message = error_of(
        file,
        "{not json",
        row("chess"),
        {"responses_create_params": {}},
        {"agent_ref": {"name": "sums"}},
        "[1]",
        row("chess"),
        row(_ng_task_index="x"),
        row("go"),
    )
    for text in (
        str(file),
        "line 1: not JSON",
        "line 3: agent_ref is missing",
        "line 4: responses_create_params is missing",
        "line 5: [1], a row is a JSON object",
        "line 7: _ng_task_index is 'x'",
        "agent 'chess' is not hosted by any shard: lines 2, 6",
        "agent 'go' is not hosted by any shard: lines 8",
        "hosted agents: sums (shard left), products (shard right)",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [row("sums", _ng_task_index=1), row("products", _ng_task_index=1)],
            "lines 1, 2, one _ng_task_index: agents ['products', 'sums']",
        ),
        ([row(_ng_task_index=1)] * 3, "lines 1, 2, 3, one _ng_task_index: 3 rows"),
        (
            [row(_ng_task_index=1, _ng_rollout_index=i) for i in (0, 0)],
            "_ng_rollout_index [0, 0], it must be each of 0..1 once",
        ),
        ([row(_ng_task_index=1, _ng_rollout_index=0), row(_ng_task_index=1)], "[0, None]"),
        ([row(agent_ref={"name": ""})], "line 1: agent_ref is {'name': ''}"),
        ([row(answer=float("nan"))], "line 1: not JSON"),
        ([row(), row(answer="x" * 5000)], "line 2: the prompt takes"),
        ([], "has no rows"),
    ],
)
def test_a_wrong_group_or_row_is_named(file, lines, expected):
    assert expected in error_of(file, *lines, max_prompt_bytes=4096)


def test_a_long_list_of_problems_is_cut(file):
    message = error_of(file, *["{"] * 30)
    assert "line 20: not JSON" in message
    assert "line 21" not in message
    assert "and 10 more" in message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"data\.train_jsonl_fpath .*nowhere: No such file"):
        opened(tmp_path / "nowhere")


def test_a_file_that_changed_is_no_prompt(file):
    dataset = opened(written(file, row(), row()))
    with file.open("r+") as changing:
        changing.write("###")
    with pytest.raises(DatasetError, match="changed while it was in use: no row starts at byte 0"):
        dataset.rows_of(0, 0)


def test_prompts_carry_the_identity_that_a_gym_knows():
    manifest = make_manifest(num_generations_per_prompt=G)
    prompter = Prompter(manifest, deadline_s=30.0)
    task = task_of(5, target=3, slot=1, attempt=2, min_version=2, alone=True)
    group = prompter.prompt(task, [row(n=n, _ng_task_index=900) for n in range(G)])
    assert group.stamp == make_stamp(manifest, 5, 2, 3, G)
    assert (group.group_size, group.min_version, group.alone) == (G, 2, True)
    assert [orjson.loads(payload) for payload in group.rows] == [
        row(n=n, _ng_task_index=5, _ng_attempt_index=2, _ng_rollout_index=n, _rowidx=4 + n)
        for n in range(G)
    ]


def test_a_prompt_of_one_row_is_sent_once():
    prompter = Prompter(make_manifest(), deadline_s=30.0)
    group = prompter.prompt(task_of(5), [row(_ng_attempt_index=7)])
    assert [orjson.loads(payload) for payload in group.rows] == [row(_ng_task_index=5)]
