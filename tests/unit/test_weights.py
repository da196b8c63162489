import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from schemas.errors import ConfigError
from tests.unit.rollouts import random_batch
from tests.unit.tiny_models import VOCAB, make_llama, make_qwen2, policy_config
from trainer import parallel
from trainer.architecture import read_architecture
from trainer.megatron import Policy
from trainer.parallel import ModelParallel
from trainer.weights import export_weights, to_hf, to_shard

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "qwen2-tied": lambda directory: make_qwen2(directory, tie_word_embeddings=True),
    "qwen2-untied": lambda directory: make_qwen2(directory, tie_word_embeddings=False),
    "llama-tied": lambda directory: make_llama(directory, tie_word_embeddings=True),
    "llama-untied": lambda directory: make_llama(directory, tie_word_embeddings=False),
    "llama3-rope": lambda directory: make_llama(directory, rope_parameters=LLAMA3_ROPE),
    "wide-heads": lambda directory: make_llama(directory, head_dim=32, num_key_value_heads=4),
}


@pytest.fixture(scope="module", autouse=True)
def _job():
    parallel.start(ModelParallel(), seed=1)
    yield
    parallel.stop()


def reference_logprobs(directory, batch, temperature=1.0):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    lengths = batch.input_lengths.unsqueeze(1)
    attention = (torch.arange(batch.input_ids.shape[1]) < lengths).long()
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=attention).logits / temperature
    scored = torch.log_softmax(logits[:, :-1], -1).gather(2, batch.input_ids[:, 1:, None])
    return scored.squeeze(2) * attention[:, 1:], attention[:, 1:]


@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_equal_those_of_transformers(kind, tmp_path):
    directory = MODELS[kind](tmp_path / "model")
    batch = random_batch(vocab=VOCAB)
    policy = Policy(policy_config(directory), rollouts_per_step=16, max_num_steps=10)
    ours = policy.logprobs(batch)
    theirs, real = reference_logprobs(directory, batch)
    assert ours.dtype == torch.float32
    assert ours[:, 0].tolist() == [0] * batch.rows
    assert (ours[:, 1:] * real - theirs).abs().max() < 1e-4


def test_temperature_scales_the_logits(tmp_path):
    directory = make_qwen2(tmp_path / "model")
    batch = random_batch(vocab=VOCAB)
    config = policy_config(directory, generation={"temperature": 0.7})
    ours = Policy(config, rollouts_per_step=16, max_num_steps=10).logprobs(batch)
    theirs, real = reference_logprobs(directory, batch, temperature=0.7)
    assert (ours[:, 1:] * real - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_keeps_every_bit(kind, tmp_path):
    directory = MODELS[kind](tmp_path / "model")
    (directory / "tokenizer_config.json").write_text("{}")
    policy = Policy(policy_config(directory), rollouts_per_step=16, max_num_steps=10)
    target = tmp_path / "weights" / "v1"
    export_weights(policy.model, policy.architecture, directory, target, "epoch1")
    before, after = (load_file(d / "model.safetensors") for d in (directory, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (target / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    assert (target / "tokenizer_config.json").exists()
    assert [path.name for path in target.parent.iterdir()] == ["v1"]
    AutoModelForCausalLM.from_pretrained(target)


def test_a_name_is_never_used_twice(tmp_path):
    directory = make_qwen2(tmp_path / "model")
    policy = Policy(policy_config(directory), rollouts_per_step=16, max_num_steps=10)
    export_weights(policy.model, policy.architecture, directory, tmp_path / "v1", "epoch1")
    before = (tmp_path / "v1" / "model.safetensors").stat()
    with pytest.raises(FileExistsError, match="v1 exists"):
        export_weights(policy.model, policy.architecture, directory, tmp_path / "v1", "epoch2")
    assert (tmp_path / "v1" / "model.safetensors").stat() == before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("split", ["whole", "columns", "qkv", "gate_up", "vocab"])
def test_shards_put_together_are_the_tensors(split, ranks, tmp_path):
    architecture = read_architecture(make_qwen2(tmp_path / "model"))
    rows = {"qkv": [64, 32, 32], "gate_up": [96, 96], "vocab": [VOCAB]}.get(split, [64])
    tensors = [torch.randn(count, 64) for count in rows]
    shards = [to_shard(split, tensors, architecture, rank, ranks) for rank in range(ranks)]
    assert len({shard.shape for shard in shards}) == 1
    back = to_hf(split, shards, architecture)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


def test_a_missing_tensor_and_a_wrong_vocabulary_are_named(tmp_path):
    directory = make_qwen2(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    short = dict(tensors)
    del short["model.layers.1.mlp.up_proj.weight"]
    save_file(short, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Policy(policy_config(directory), rollouts_per_step=16, max_num_steps=10)
    wide = dict(tensors)
    wide["model.embed_tokens.weight"] = torch.zeros(VOCAB + 1, 64)
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"has {VOCAB + 1} rows"):
        Policy(policy_config(directory), rollouts_per_step=16, max_num_steps=10)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(key, value, tmp_path):
    directory = make_qwen2(tmp_path / "model")
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError):
        read_architecture(directory)


def test_rope_theta_of_older_files_is_read(tmp_path):
    directory = make_qwen2(tmp_path / "model")
    values = json.loads((directory / "config.json").read_text())
    del values["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(values | {"rope_theta": 1e6}))
    assert read_architecture(directory).rotary_base == 1e6
