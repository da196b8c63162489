"""The metrics line of a step, and the file that it is appended to."""

import json
from typing import Any

import pytest
import torch

from schemas.records import AssembledGroup, RolloutRow
from tests.rows import execution_of, make_identity, make_manifest, make_row
from trainer.metrics import Durations, MetricsFile, logprob_error_max, step_metrics, timing
from trainer.traces import BatchSettings, build_batch

MANIFEST = make_manifest()
SETTINGS = BatchSettings(max_total_sequence_length=64, pad_token_id=0)
DURATIONS = Durations(wait_s=1.0, train_s=2.0, publish_s=1.0)


def make_group(task: int, rows: list[dict[str, Any]], *, version: int = 0) -> AssembledGroup:
    made: list[RolloutRow] = [
        make_row(MANIFEST, task, index, target_step=3, version=version, **changes)
        for index, changes in enumerate(rows)
    ]
    return AssembledGroup(
        **make_identity(MANIFEST, task, target_step=3),
        execution_id=execution_of(task),
        generation_version=version,
        accepted_at_ms=1,
        rows=made,
    )


def line_of(groups: list[AssembledGroup]) -> dict[str, Any]:
    batch = build_batch([each.rows for each in groups], SETTINGS)
    trained = {"loss": 0.25, "grad_norm": 2.0, "zero_update": 0.0}
    return step_metrics(3, groups, batch, trained, DURATIONS, at_ms=5)


def test_rewards_are_means_over_rows_that_are_not_masked():
    sums = make_group(4, [{"reward": 1.0}, {"reward": 0.5}, {"reward": 9.0, "masked": True}])
    products = make_group(2, [{"reward": 0.0, "agent": "products"}] * 3)
    line = line_of([products, sums])
    assert line["tasks"] == [2, 4]
    assert line["reward"] == {"products": 0.0, "sums": 0.75}
    assert line["reward_mean"] == pytest.approx(1.5 / 5)
    assert (line["rows"], line["masked_rows"], line["gym/invalid_rollouts"]) == (6, 1, 1.0)


def test_staleness_tokens_and_seconds():
    groups = [make_group(0, [{}, {}], version=3), make_group(1, [{}, {"masked": True}], version=2)]
    line = line_of(groups)
    assert line["staleness"] == 0.5
    assert (line["tokens"], line["eligible_tokens"]) == (24, 18)
    assert line["step_s"] == 4.0
    assert line["tokens_per_s"] == 6.0
    assert (line["step"], line["loss"], line["grad_norm"], line["at_ms"]) == (3, 0.25, 2.0, 5)


def test_a_step_without_groups_is_a_zero_update():
    line = step_metrics(3, [], None, {}, DURATIONS, at_ms=5)
    assert (line["tasks"], line["reward"], line["zero_update"]) == ([], {}, 1.0)
    assert line["reward_mean"] is None
    assert (line["loss"], line["tokens"], line["eligible_tokens"]) == (0.0, 0, 0)


def test_timing_is_the_slowest_attempts():
    slow = make_group(0, [{}, {"timing": {"total": 9.0, "generate": 2.0}}])
    quick = make_group(1, [{"timing": {"total": 1.0, "generate": 3.0}}, {}])
    assert timing([slow, quick]) == {"timing/generate": 3.0, "timing/total": 9.0}


def test_several_shards_have_their_own_timing():
    ours = make_group(0, [{"timing": {"total": 9.0}}])
    theirs = make_group(1, [{"timing": {"total": 11.0}, "shard": "other"}])
    assert timing([ours, theirs]) == {
        "timing/total": 11.0,
        "timing/shard/gym/total": 9.0,
        "timing/shard/other/total": 11.0,
    }


def test_logprob_error_is_the_largest_of_eligible_tokens():
    groups = [make_group(0, [{}, {"masked": True}])]
    batch = build_batch([groups[0].rows], SETTINGS)
    prev = batch.generation_logprobs.clone()
    prev[0, 1] += 5.0  # a prompt token
    prev[1] += 5.0  # a masked row
    prev[0, 4] -= 0.5
    assert logprob_error_max(batch, prev) == pytest.approx(0.5)
    assert logprob_error_max(batch, torch.zeros_like(prev)) > 0.5


def test_a_torn_line_is_cut_and_whole_ones_stay(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    MetricsFile(path).append({"step": 0, "tasks": [1, 2]})
    with path.open("ab") as file:
        file.write(b'{"step": 1, "ta')
    MetricsFile(path).append({"step": 1, "tasks": [3]})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
