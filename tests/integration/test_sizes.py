"""The largest rows and groups, from `rows` to the trainer; larger ones are told with their size."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from infra.audit.group_check import flaws_of
from schemas import topics as keys
from schemas.codec import PREFIX_BYTES, encode, encode_group
from schemas.limits import MIB
from schemas.records import AssembledGroup, EventKind, LastTarget, Manifest, RolloutRow
from tests.assembling import Run, assembler, create, wait_for
from tests.integration.trainer_runs import new_run, random_trace
from tests.rows import execution_of, make_identity, make_row, make_rows
from tests.run import read_topic
from tests.unit.tiny_models import make_qwen2

ROW, GROUP, G = 16 * MIB, 128 * MIB, 8
HAPPENS_WITHIN_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2(tmp_path_factory.mktemp("models") / "tiny", num_attention_heads=2)


@pytest.fixture
def small_run(broker: Any, run_id: str, tmp_path: Path) -> Callable[..., Run]:
    return partial(create, broker.bootstrap_servers, run_id, tmp_path)


def sized(row: RolloutRow, size: int) -> bytes:
    """The row in `size` bytes, filled up with a gym's full result."""
    filling = os.urandom(size)
    over = len(encode(replace(row, full_result=filling))) - size
    payload = encode(replace(row, full_result=filling[over:]))
    missing = size - len(payload)  # where a shorter result has a shorter length before it
    return encode(replace(row, full_result=filling[over - missing :])) if missing else payload


def trainable(manifest: Manifest, index: int) -> RolloutRow:
    """A row of task 0 with tokens of the tiny model."""
    return make_row(manifest, 0, index, traces=[random_trace(f"row-{index}", seed=index)])


def header_bytes(manifest: Manifest, task: int) -> int:
    """What an AssembledGroup has beside its rows, with a wall clock of today."""
    header = AssembledGroup(
        **make_identity(manifest, task),
        execution_id=execution_of(task),
        generation_version=0,
        accepted_at_ms=1 << 41,
        rows=[],
    )
    return len(encode_group(header, []))


def test_a_row_of_16_and_a_group_of_128_mib_are_trained(
    broker: Any, run_id: str, model: Path, tmp_path: Path
) -> None:
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": G}
    trained = new_run(broker.bootstrap_servers, run_id, model, tmp_path / "run", grpo=grpo)
    run = Run(trained.config, trained.manifest, trained.topics)
    trained.send(run.topics.control, keys.CONTROL_LAST_TARGET, LastTarget(target_step=0))
    rows = [sized(trainable(run.manifest, index), ROW) for index in range(G - 1)]
    last = GROUP - header_bytes(run.manifest, 0) - (G - 1) * (ROW - PREFIX_BYTES) + PREFIX_BYTES
    rows.append(sized(trainable(run.manifest, G - 1), last))
    trainer = trained.process(tmp_path)
    try:
        for row in reversed(rows):
            run.send_rows([(0, row)])
        with assembler(run):
            assert trainer.wait(HAPPENS_WITHIN_S) == 0, (tmp_path / "trainer.log").read_text()
    finally:
        trainer.kill()
    (message,) = read_topic(run.config, run.topics.groups)
    assert len(message.value()) == GROUP
    (group,) = run.groups()
    sent = {(0, 0, index): row for index, row in enumerate(rows)}
    assert flaws_of(group, message.value(), sent, 0, run.manifest) == []
    (line,) = trained.metrics()
    assert (line["step"], line["tasks"], line["rows"]) == (0, [0], G)


def test_one_byte_more_is_too_large_and_both_numbers_are_said(
    small_run: Callable[..., Run],
) -> None:
    limit, group_limit = 2048, 4096
    run = small_run(max_row_bytes=limit, max_group_bytes=group_limit)
    manifest = run.manifest
    fits = (group_limit - header_bytes(manifest, 2)) // 4 + PREFIX_BYTES
    for task, sizes in {
        0: [limit + 1],
        2: [fits] * 4,
        4: [fits] * 3 + [fits + 4],
    }.items():
        rows = [make_row(manifest, task, index) for index in range(len(sizes))]
        run.send_rows([(task, sized(*each)) for each in zip(rows, sizes, strict=True)])
    with assembler(run) as running:
        wait_for("an end of 4", lambda: bool(run.events(EventKind.ABANDONED)), running)
        wait_for("group of 2", lambda: len(run.groups()) == 1, running)
    assert run.groups()[0].task_index == 2
    (letter,) = run.dead_letters()
    headers = {name: value.decode() for name, value in letter.headers()}
    assert headers[keys.DLQ_REASON] == "row_too_large"
    assert f"{limit + 1} bytes, limit {limit}" in headers[keys.DLQ_MESSAGE]
    (failed,) = run.events(EventKind.ATTEMPT_FAILED)
    assert (failed.task_index, failed.reason) == (0, "row_too_large")
    (abandoned,) = run.events(EventKind.ABANDONED)
    assert (abandoned.task_index, abandoned.reason) == (4, "too_large")
    assert re.search(rf"4 of 4 rows have 4\d{{3}} bytes, limit {group_limit}", abandoned.message)


def test_the_run_moves_under_a_budget_of_two_groups(small_run: Callable[..., Run]) -> None:
    budget = 2 * MIB + 100_000
    run = small_run(assembler_memory_bytes=budget)
    tokens = 32_768  # 256 KiB a row, 1 MiB a group
    rows = {task: make_rows(run.manifest, task, tokens=tokens) for task in range(24)}
    for index in range(3):
        run.send_rows([(task, rows[task][index]) for task in reversed(range(24))])
    with assembler(run) as running:
        wait_for("72 rows", lambda: run.heartbeat("a").get("rows") == 72, running)
        assert budget / 2 < run.heartbeat("a")["buffered_bytes"] <= budget
        run.send_rows([(task, rows[task][3]) for task in reversed(range(24))])
        wait_for("24 groups", lambda: len(run.groups()) == 24, running)
    assert sorted(event.task_index for event in run.events(EventKind.ACCEPTED)) == list(range(24))
