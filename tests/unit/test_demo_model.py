"""The demo model: equal for equal seeds, loadable, and neither ignorant nor finished."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.demo_model import (
    DEMO_AGENTS,
    EOS,
    PAD,
    DemoModel,
    Recipe,
    WarmUpFailed,
    make_demo_model,
)
from producers.generation.tokens import Tokens
from producers.gyms.reasoning_gym_rows import rows

# A tenth of the real warm-up, which tests/integration sees through `groupstream demo`.
QUICK = Recipe(facts_known=0.05, max_fact_steps=40, confusion_steps=10)


def make(directory: Path, seed: int) -> tuple[DemoModel, list[float]]:
    shares: list[float] = []
    made = make_demo_model(
        directory, seed=seed, recipe=QUICK, progress=lambda share, _: shares.append(share)
    )
    return made, shares


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("demo") / "model", seed=3)


def test_the_directory_is_a_hugging_face_model(made):
    model_directory = made[0].directory
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    assert model.config.model_type == "qwen2"
    assert model.dtype == torch.float32
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS, PAD)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (EOS, PAD)
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert len(tokenizer) == model.config.vocab_size
    assert sum(p.numel() for p in model.parameters()) == made[0].parameters
    assert [path.name for path in model_directory.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("text", ["3 + 4 =", "-7", "any text\nat all, 7\N{DEGREE SIGN}"])
def test_the_tokenizer_gives_back_any_text(made, text):
    tokens = Tokens(made[0].directory)
    ids = tokens.prompt_ids([{"role": "user", "content": text}])
    assert len(ids) == len(text.encode())
    assert tokens.text([*ids, EOS]) == text
    assert tokens.stop_token_ids == [EOS]


def test_an_equal_seed_gives_equal_weights(made, tmp_path):
    first = load_file(made[0].directory / "model.safetensors")
    again = load_file(make(tmp_path / "again", seed=3)[0].directory / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_accuracy_is_reported_for_each_agent_and_progress_goes_up(made):
    model, shares = made
    assert set(model.accuracy) == set(DEMO_AGENTS)
    assert all(0 < value < 1 for value in model.accuracy.values())
    assert shares[-1] == 1.0
    assert all(0 <= earlier <= 1 for earlier in shares)
    assert all(earlier <= later for earlier, later in pairwise(shares[-2:]))


def test_a_warm_up_that_does_not_learn_is_an_error(tmp_path):
    with pytest.raises(WarmUpFailed, match="100% wanted"):
        make_demo_model(
            tmp_path / "model",
            seed=0,
            recipe=Recipe(facts_known=1.0, max_fact_steps=10),
            progress=lambda *_: None,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_problems_have_one_digit_and_the_compact_prompt():
    for row in rows(DEMO_AGENTS, rows_per_agent=50, seed=0):
        left, sign, right, equals = row["responses_create_params"]["input"].split(" ")
        assert (left.isdigit(), right.isdigit(), equals) == (True, True, "=")
        assert len(left) == len(right) == 1
        assert sign in ("+-" if row["agent_ref"]["name"] == "sums" else "*")
