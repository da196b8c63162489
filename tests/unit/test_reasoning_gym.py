"""reasoning-gym tasks: rows, answers, rewards, and rows in completion order. No vLLM."""

import asyncio
import json

import numpy as np
import pytest

from producers.generation.generation import Generation, GenerationFailed, VersionSpan
from producers.generation.tokens import messages_of
from producers.gyms.protocol import RolloutRequest, load_gym
from producers.gyms.reasoning_gym import (
    FamilySettings,
    ReasoningGym,
    extract_answer,
    family_settings,
)
from producers.gyms.reasoning_gym_rows import rows, write_dataset
from schemas.errors import ConfigError, DatasetError
from schemas.records import RolloutRow
from schemas.validation import check_row
from schemas.vectors import logprobs, tokens

AGENTS = {
    "sums": {"family": "chain_sum", "prompt": "{expression} =", "exact": True},
    "products": {"family": "products"},
}


class Letters:
    """A tokenizer with a token a character."""

    stop_token_ids = (0,)

    def prompt_ids(self, messages):
        return [ord(letter) for letter in messages[0]["content"]]

    def text(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)


class Scripted:
    """A model that says the n-th answer after the n-th delay, or raises it."""

    def __init__(self, answers, delays_s=None):
        self.tokens = Letters()
        self.answers = answers
        self.delays_s = delays_s or [0.0] * len(answers)
        self.cancelled = []

    async def sample(self, prompt_token_ids, *, model_call_id, deadline_s, max_new_tokens=None):
        index = int(model_call_id.split("/")[0].split("-")[1])
        try:
            await asyncio.sleep(self.delays_s[index])
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        answer = self.answers[index]
        if isinstance(answer, Exception):
            raise answer
        ids = np.array([ord(letter) for letter in answer] + [0], dtype=np.int32)
        return Generation(
            request_id=model_call_id,
            prompt_token_ids=prompt_token_ids,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            finish_reason="stop",
            version_start=3,
            version_end=4,
            versions=[VersionSpan(0, 1, 3), VersionSpan(1, len(ids), 4)],
        )


def a_row(agent="sums", answer="7"):
    family = AGENTS[agent]["family"]
    return {
        "responses_create_params": {"input": "3 + 4 ="},
        "agent_ref": {"name": agent},
        "question": "3 + 4?",
        "answer": answer,
        "metadata": {"source_dataset": family},
    }


def group_of(size, agent="sums", deadline_s=20.0, **row):
    return RolloutRequest(
        task_index=5,
        attempt=0,
        agent=agent,
        rows=[a_row(agent, **row)] * size,
        rollout_ids=[f"5-{index}" for index in range(size)],
        deadline_s=deadline_s,
    )


def collect(model, group):
    gym = ReasoningGym(("sums", "products"), model, AGENTS)

    async def run():
        return [item async for item in gym.run(group)]

    return asyncio.run(run())


def test_rows_come_in_completion_order_and_the_last_has_the_timing():
    items = collect(Scripted(["7", "8", "7"], [0.2, 0.0, 0.1]), group_of(3))
    assert [index for index, _, _ in items] == [1, 2, 0]
    assert [result.reward for _, result, _ in items] == [0.0, 1.0, 1.0]
    assert [timing is None for _, _, timing in items] == [True, True, False]
    timing = items[-1][2]
    assert 0 <= timing["first_row"] <= timing["run_rollouts"] < 20


def test_a_result_makes_a_row_that_may_be_trained():
    [(index, result, timing)] = collect(Scripted(["is 7"]), group_of(1))
    [trace] = result.traces
    assert tokens(trace.token_ids).tolist() == [*map(ord, "3 + 4 ="), *map(ord, "is 7"), 0]
    assert logprobs(trace.generation_logprobs).tolist() == [0.0] * 7 + [-0.5] * 5
    [span] = trace.sampled_spans
    assert (span.start, span.end, span.version_start, span.version_end) == (7, 12, 3, 4)
    assert result.full_result["output"] == "is 7"
    check_row(
        RolloutRow(
            run_id="r", task_index=5, attempt=0, group_size=1, target_step=0, stamp=b"12345678",
            row_index=index, execution_id="e", traces=result.traces, rollout_id="5-0", rowidx=0,
            agent="sums", shard="s", replica=0, reward=result.reward,
            version_start=result.version_start, produced_at_ms=1, timing=timing,
        )
    )  # fmt: skip


def test_exact_turns_a_partial_score_into_nothing():
    model = Scripted(["17"])
    assert collect(model, group_of(1))[0][1].reward == 0.0
    assert collect(model, group_of(1, "products"))[0][1].reward == 0.5  # "7" is half of "17"


def test_a_failed_row_fails_the_group_and_ends_the_others():
    model = Scripted(["7", GenerationFailed("infra", "the engine ended"), "7"], [9.0, 0.0, 9.0])
    with pytest.raises(GenerationFailed, match="the engine ended"):
        collect(model, group_of(3))
    assert sorted(model.cancelled) == [0, 2]


def test_the_deadline_names_the_rows_that_are_missing():
    with pytest.raises(GenerationFailed, match=r"rows \[1\] did not end within 0.3 s") as caught:
        collect(Scripted(["7", "7"], [0.0, 9.0]), group_of(2, deadline_s=0.3))
    assert caught.value.failure_class == "infra"


def test_closing_early_ends_the_rows():
    model = Scripted(["7", "7"], [0.0, 9.0])

    async def run():
        stream = ReasoningGym(("sums",), model, AGENTS).run(group_of(2))
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert model.cancelled == [1]


def test_a_row_of_another_family_is_refused():
    group = group_of(1)
    group.rows[0] = {**a_row(), "metadata": {"source_dataset": "leg_counting"}}
    with pytest.raises(DatasetError, match="'leg_counting', its agent scores 'chain_sum'"):
        collect(Scripted(["7"]), group)


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("3 + 4 is 7.", {}, "7"),
        ("so -1,200.50", {}, "-1,200.50"),
        ("none", {}, None),
        ("Answer: 3\nAnswer: cat ", {"answer": "after_marker"}, "cat"),
        ("=> cat", {"answer": "after_marker", "marker": "=>"}, "cat"),
        ("cat", {"answer": "after_marker"}, None),
        ("<answer>cat</answer> ok", {"answer": "answer_tag"}, "cat"),
        (" a cat\n", {"answer": "whole"}, "a cat"),
    ],
)
def test_which_part_of_a_text_is_the_answer(text, how, answer):
    assert extract_answer(text, FamilySettings(family="chain_sum", **how)) == answer


def test_a_dataset_is_the_same_for_the_same_seed_and_takes_turns(tmp_path):
    first, again, other = (tmp_path / name for name in ("a", "b", "c"))
    write_dataset(first, AGENTS, rows_per_agent=20, seed=1)
    write_dataset(again, AGENTS, rows_per_agent=20, seed=1)
    write_dataset(other, AGENTS, rows_per_agent=20, seed=2)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert [line["agent_ref"]["name"] for line in lines] == ["sums", "products"] * 20
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b", "c"]
    assert lines[0]["responses_create_params"]["input"].endswith(" =")
    assert lines[1]["responses_create_params"]["input"] == lines[1]["question"]


def test_the_right_answer_of_every_row_gets_the_full_reward():
    for row in list(rows(AGENTS, rows_per_agent=5, seed=3)):
        group = group_of(1, row["agent_ref"]["name"])
        group.rows[0] = json.loads(json.dumps(row))
        assert collect(Scripted([f"It is {row['answer']}"]), group)[0][1].reward == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "agents.sums.settings: family: Field required"),
        ({"family": "chain_sun"}, "no 'chain_sun'; near ones: .*chain_sum"),
        ({"family": "chain_sum", "exakt": True}, "exakt"),
    ],
)
def test_wrong_settings_name_agent_and_key(settings, message):
    with pytest.raises(ConfigError, match=message):
        family_settings("sums", settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "chain_sum", "parameters": {"terms": 2}}, "settings.parameters: .*terms"),
        ({"family": "chain_sum", "parameters": {"min_terms": 0}}, "min_terms must be positive"),
        (
            {"family": "chain_sum", "prompt": "{expresion}"},
            "'expresion'; chain_sum has",
        ),
    ],
)
def test_wrong_parameters_name_agent_and_key(settings, message):
    with pytest.raises(ConfigError, match=message):
        list(rows({"sums": settings}, rows_per_agent=1, seed=0))


def test_messages_of_a_row():
    assert messages_of(a_row()) == [{"role": "user", "content": "3 + 4 ="}]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = {"responses_create_params": {"input": [{"role": "system", "content": parts}]}}
    assert messages_of(given) == [{"role": "system", "content": "ab"}]
    with pytest.raises(DatasetError, match=r"no responses_create_params.input"):
        messages_of({"input": "x"})


def test_a_gym_is_found_by_its_path():
    assert load_gym("producers.gyms.reasoning_gym:ReasoningGym") is ReasoningGym
    for wrong in ("no.such.module:Gym", "producers.gyms.reasoning_gym:NoGym", "nothing"):
        with pytest.raises(ConfigError, match=wrong):
            load_gym(wrong)
    with pytest.raises(ConfigError, match="no run"):
        load_gym("producers.gyms.merge:StreamFailed")
