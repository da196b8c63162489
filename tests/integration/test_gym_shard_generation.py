"""A gym shard with the real vLLM, a tiny random model and reasoning-gym tasks."""

import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from producers.generation.tokens import Tokens, messages_of
from producers.gym_shard import run
from producers.gyms.reasoning_gym_rows import rows
from schemas.config import Config
from schemas.records import ExecutionStarted, Finished, PolicyVersion, RolloutRow
from schemas.status import now_ms
from schemas.topics import CONTROL_FINISHED, CONTROL_POLICY
from schemas.validation import check_row
from schemas.vectors import tokens
from tests.integration.test_gym_shard import Line

LETTERS = "0123456789+-= "
END = "<end>"
START_S = 300.0  # of vLLM, on a machine that does other things too


def make_model(directory: Path, seed: int) -> Path:
    """A character-level model in Hugging Face format."""
    vocabulary = {letter: index for index, letter in enumerate([END, *LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return directory


SETTINGS = {
    "family": "chain_sum",
    "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "prompt": "{expression} =",
}


@pytest.fixture
def line(broker, run_id, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    config = Config.model_validate(
        {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers, "num_partitions": 2},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
            "data": {"train_jsonl_fpath": str(tmp_path / "prompts.jsonl")},
            "policy": {
                "model_name": str(make_model(tmp_path / "model", 0)),
                "max_total_sequence_length": 64,
                "generation": {
                    "max_new_tokens": 8,
                    "vllm_cfg": {"precision": "float32", "max_num_seqs": 8},
                },
            },
            "env": {
                "agents": {
                    "sums": {
                        "gym": "producers.gyms.reasoning_gym:ReasoningGym",
                        "settings": SETTINGS,
                    }
                }
            },
        }
    )
    made = Line(config)
    yield made
    made.close()


def test_rows_are_sampled_by_the_announced_policy(line, tmp_path):
    def policy(version: int) -> None:
        directory = make_model(tmp_path / "weights" / str(version), version + 1)
        record = PolicyVersion(
            version=version, weights_dir=str(directory), published_at_ms=now_ms()
        )
        line.control(CONTROL_POLICY, record)

    problems = list(rows({"sums": SETTINGS}, 3, seed=1))
    stop, raised = threading.Event(), []

    def serve() -> None:
        try:
            run(line.config, shard="gym", replica=0, stop=stop)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        policy(0)
        line.prompt(0, rows=[problems[0]], deadline_s=60.0)
        line.prompt(1, rows=[problems[1]], deadline_s=60.0, partition=1)
        line.prompt(2, rows=[problems[2]], deadline_s=60.0, min_version=1)
        line.until(
            lambda: raised or len(line.rows_of(0)) + len(line.rows_of(1)) == 8, within_s=START_S
        )
        policy(1)
        line.until(lambda: raised or len(line.rows_of(2)) == 4)
        line.control(CONTROL_FINISHED, Finished(step=1, at_ms=now_ms()))
        thread.join(30)
        assert not thread.is_alive()
    finally:
        stop.set()
        thread.join(60)
    assert raised == []
    expected = Tokens(tmp_path / "model")
    for row in line.of(RolloutRow):
        check_row(row)
        (trace,) = row.traces
        (span,) = trace.sampled_spans
        prompt = expected.prompt_ids(messages_of(problems[row.task_index]))
        ids = tokens(trace.token_ids).tolist()
        assert ids[: span.start] == prompt
        assert 0 < span.end - span.start <= 8
        assert row.truncated == (ids[-1] != 0)
        versions = (row.version_start, span.version_start, span.version_end)
        assert versions == ((1, 1, 1) if row.task_index == 2 else (0, 0, 0))
    versions = {record.task_index: record.version_start for record in line.of(ExecutionStarted)}
    assert versions == {0: 0, 1: 0, 2: 1}
