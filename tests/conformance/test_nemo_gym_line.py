"""Recorded NeMo Gym rollouts through the line: rows, a real assembler, groups, a training batch."""

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from producers.nemo_gym import rollout_result
from schemas.codec import row_payloads
from schemas.errors import RowRejected
from schemas.records import AssembledGroup
from tests.conformance.line import GROUP_SIZE, PAD, Line, line_on
from tests.nemo_rollouts import (
    ORDER,
    Record,
    Recorded,
    agent,
    as_group,
    card_game,
    coding,
    model_calls,
    output_types,
    recorded,
)
from trainer.traces import TrainingBatch

RECORDED = recorded()
WITH_IDS = [each for each in RECORDED if each.has_token_ids]
WITHOUT_IDS = [each for each in RECORDED if not each.has_token_ids]
WITH_COMPONENTS = [each for each in RECORDED if each.has_components]
FIGURES = {  # prompt tokens, sampled tokens in the file's order
    "written_coding": (9, [15, 19, 21, 13, 17]),
    "competitive_coding": (109, [785, 959, 1038, 964, 1277]),
}


@pytest.fixture(scope="module")
def line(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    run_id = f"conformance-{uuid.uuid4().hex[:8]}"
    with line_on(broker.bootstrap_servers, run_id, tmp_path_factory.mktemp(run_id)) as line:
        yield line


def name_of(given: Recorded) -> str:
    return given.name


@pytest.mark.parametrize("given", WITH_IDS, ids=name_of)
def test_a_group_out_of_order_becomes_a_training_batch(line: Line, given: Recorded) -> None:
    step = line.step()
    ((task, complete),) = line.play(step, given.records).items()
    assert complete
    (group,), batch = line.batch(step, 1)
    by_index = sorted(given.records, key=lambda record: record["_ng_rollout_index"])

    assert [row.row_index for row, _ in line.rows(task)] == list(ORDER)
    assert_group_is_whole(line, group, task)
    assert [row.reward for row in group.rows] == [record["reward"] for record in by_index]
    padding = batch.rows - GROUP_SIZE  # the micro-batch of 4 takes 8 rows
    assert padding == 3
    names = [f"{task}-{index}" for index in range(GROUP_SIZE)]
    assert batch.rollout_ids == (*names, *[""] * padding)
    for place, record in enumerate(by_index):
        assert_row_holds(batch, place, record)
    owned = [len(sampled_of(record)) for record in by_index]
    assert batch.eligible_tokens == sum(owned)
    assert batch.token_mask.sum(dim=1).tolist() == owned + [0.0] * padding
    assert batch.sample_mask.tolist() == [1.0] * GROUP_SIZE + [0.0] * padding
    assert_advantages_follow_rewards(batch, [row.reward for row in group.rows])


@pytest.mark.parametrize("given", [each for each in WITH_IDS if each.name in FIGURES], ids=name_of)
def test_the_figures_of_a_file_are_known(given: Recorded) -> None:
    prompt_tokens, sampled_tokens = FIGURES[given.name]
    assert [len(model_calls(record)[0]["prompt_token_ids"]) for record in given.records] == [
        prompt_tokens
    ] * GROUP_SIZE
    assert [len(sampled_of(record)) for record in given.records] == sampled_tokens


@pytest.mark.parametrize("given", WITHOUT_IDS, ids=name_of)
def test_a_rollout_without_token_ids_is_refused_by_name(given: Recorded) -> None:
    for record in given.records:
        with pytest.raises(RowRejected, match="rollout 3-1") as caught:
            rollout_result(record, "3-1", version_start=0, version_end=0)
        assert caught.value.reason == "no_generation_data"
        assert_says_what_came(str(caught.value), record)


@pytest.mark.parametrize("given", WITHOUT_IDS, ids=name_of)
def test_its_attempt_fails_with_that_reason_and_the_run_goes_on(
    line: Line, given: Recorded
) -> None:
    step = line.step()
    good = [agent(index) for index in ORDER]
    done = line.play(step, *([record] for record in given.records), good)
    *bad_tasks, good_task = done
    assert list(done.values()) == [False] * len(bad_tasks) + [True]

    (group,), _ = line.batch(step, 1)
    assert_group_is_whole(line, group, good_task)
    events = line.failures(set(bad_tasks))
    assert [event.task_index for event in events] == bad_tasks
    for event, record in zip(events, given.records, strict=True):
        assert (event.reason, event.failure_class) == ("row_rejected/no_generation_data", "data")
        assert_says_what_came(event.message, record)
    assert line.run.dead_letters() == []


def test_one_rollout_without_token_ids_fails_its_whole_attempt(line: Line) -> None:
    step = line.step()
    broken = [card_game(index) if index == 2 else coding(index) for index in ORDER]
    good = [coding(index) for index in ORDER]
    done = line.play(step, broken, good)
    broken_task, good_task = done
    assert done == {broken_task: False, good_task: True}

    groups, batch = line.batch(step, 1)
    assert [group.task_index for group in groups] == [good_task]
    assert set(batch.task_indices[:GROUP_SIZE]) == {good_task}
    (event,) = line.failures({broken_task})
    assert event.reason == "row_rejected/no_generation_data"
    assert [row.row_index for row, _ in line.rows(broken_task)] == [1, 3, 4, 0]


@pytest.mark.parametrize("given", WITH_COMPONENTS, ids=name_of)
def test_reward_components_stay_with_their_rows(line: Line, given: Recorded) -> None:
    records = as_group(given.records)
    step = line.step()
    ((task, complete),) = line.play(step, records).items()
    assert complete
    (group,), batch = line.batch(step, 1)
    assert_group_is_whole(line, group, task)
    for row, record in zip(group.rows, given.records, strict=True):
        assert row.reward_components == record["reward_components"]
        assert row.reward == record["reward"] == sum(row.reward_components.values())
    assert_advantages_follow_rewards(batch, [row.reward for row in group.rows])


def sampled_of(record: Record) -> list[int]:
    return [token for call in model_calls(record) for token in call["generation_token_ids"]]


def assert_says_what_came(message: str, record: Record) -> None:
    assert f"Prompt: {record['response']['usage']['input_tokens']} input tokens" in message
    assert f"output items: {output_types(record)}" in message


def assert_group_is_whole(line: Line, group: AssembledGroup, task: int) -> None:
    """All rows of one attempt in row order, byte for byte as they stand in `rows`."""
    assert (group.task_index, group.attempt, group.group_size) == (task, 0, GROUP_SIZE)
    assert [row.row_index for row in group.rows] == list(range(GROUP_SIZE))
    sent = {row.row_index: payload for row, payload in line.rows(task)}
    assert row_payloads(group) == [sent[index] for index in range(GROUP_SIZE)]


def assert_row_holds(batch: TrainingBatch, place: int, record: Record) -> None:
    """Ids and float32 log-probabilities are the record's, bit for bit, and the mask is exact."""
    calls = model_calls(record)
    ids = calls[-1]["prompt_token_ids"] + calls[-1]["generation_token_ids"]
    mask = np.zeros(batch.input_ids.shape[1], dtype=np.float32)
    logprobs = np.zeros_like(mask)
    for call in calls:
        start = len(call["prompt_token_ids"])
        end = start + len(call["generation_token_ids"])
        mask[start:end] = 1.0
        logprobs[start:end] = np.array(call["generation_log_probs"], dtype=np.float32)
    padding = [PAD] * (batch.input_ids.shape[1] - len(ids))
    assert batch.input_ids[place].tolist() == ids + padding
    assert batch.input_lengths[place] == len(ids)
    assert batch.token_mask[place].numpy().tobytes() == mask.tobytes()
    assert batch.generation_logprobs[place].numpy().tobytes() == logprobs.tobytes()


def assert_advantages_follow_rewards(batch: TrainingBatch, rewards: list[float]) -> None:
    """The sign of each is its reward's against the mean; equal rewards teach nothing."""
    assert not batch.advantages[GROUP_SIZE:].any()
    advantages = batch.advantages[:GROUP_SIZE].numpy()
    per_row = advantages[:, 0]
    assert (advantages == per_row[:, None]).all()
    if len(set(rewards)) == 1:
        assert not per_row.any()
    else:
        assert np.sign(per_row).tolist() == np.sign(np.array(rewards) - np.mean(rewards)).tolist()
