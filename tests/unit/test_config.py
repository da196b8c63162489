"""Wrong keys are named with a way out; defaults, overrides and derived values hold."""

import pytest
import yaml

from schemas.config import Config
from schemas.config_file import UNSUPPORTED, load_config
from schemas.errors import ConfigError
from schemas.limits import HEADER_ROOM, Limits

_BASE = {
    "run": {"id": "r1"},
    "data": {"train_jsonl_fpath": "data.jsonl"},
    "policy": {"model_name": "model"},
    "env": {"agents": {"sums": {"gym": "m:C"}, "products": {"gym": "m:C"}}},
}


@pytest.fixture
def load(tmp_path):
    def _load(*overrides, **sections):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(_BASE | sections))
        return load_config(path, overrides)

    return _load


def test_the_smallest_file_loads_with_one_shard_for_every_agent(load):
    config = load()
    assert config.grpo.num_generations_per_prompt == 16
    assert config.shard_of_agent == {"sums": "gym", "products": "gym"}
    assert config.grpo.lead == 0


def test_dotted_overrides_are_yaml_values(load):
    config = load("grpo.max_num_steps=20", "loss_fn.ratio_clip_c=3.0", "run.id=other")
    assert config.grpo.max_num_steps == 20
    assert config.loss_fn.ratio_clip_c == 3.0
    assert config.run_directory.name == "other"


def test_defaults_files_lie_below(load, tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"grpo": {"seed": 7, "max_num_steps": 5}}))
    config = load(defaults="base.yaml", grpo={"max_num_steps": 6})
    assert (config.grpo.seed, config.grpo.max_num_steps) == (7, 6)


def test_a_circle_of_defaults_is_named(load):
    with pytest.raises(ConfigError, match="circle"):
        load(defaults="config.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.num_prompt_per_step=3", "did you mean grpo.num_prompts_per_step"),
        ("kafka.bootstrap_server=x", "did you mean kafka.bootstrap_servers"),
        ("policy.generation.temprature=1.0", "did you mean policy.generation.temperature"),
        ("nonsense=1", "known: .*'checkpointing'"),
        ("grpo.seed=abc", "grpo.seed: .*found 'abc'"),
        ("grpo.use_dynamic_sampling=true", "not supported: a step takes exactly"),
        ("ppo.x=1", "ppo is not supported"),
        ("policy.train_global_batch_size=7", "train_global_batch_size is 7, and .* is 512"),
        ("policy.generation.top_p=0.9", "top_p must be 1.0"),
        ("grpo.async_grpo.enabled=true", "use_importance_sampling_correction"),
        ("shards.a.agents=[none]", "'none', which env.agents does not have"),
        ("loss_fn.truncated_importance_sampling_type=tis", "needs use_importance"),
        ("loss_fn.sequence_level_importance_ratios=true", "token_level_loss: false"),
        ("logger.wandb.log_nemo_gym_full_result_tables=true", "needs logger.wandb_enabled"),
        ("loss_fn.truncated_importance_sampling_ratio=2.0", "needs truncated_importance_samp"),
        ("run.id='a b'", "run.id"),
    ],
)
def test_what_is_wrong_is_named(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(override)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "leaves no ratio"),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
            },
            "seq-mask-tis weighs tokens",
        ),
    ],
)
def test_losses_that_contradict_themselves_are_refused(load, loss, message):
    with pytest.raises(ConfigError, match=message):
        load(loss_fn=loss)


def test_an_agent_lives_in_one_shard(load):
    shards = {"a": {"agents": ["sums"]}, "b": {"agents": ["sums"]}}
    with pytest.raises(ConfigError, match="'sums' is hosted by shards 'a' and 'b'"):
        load(shards=shards)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_unsupported_keys_are_not_known_keys():
    for key in UNSUPPORTED:
        model = Config
        for part in key.split(".")[:-1]:
            model = model.model_fields[part].annotation
        assert key.rsplit(".", maxsplit=1)[-1] not in model.model_fields


def test_every_key_is_documented():
    def sections(model):
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from sections(field.annotation)
            elif not (name in ("kafka", "grpo") or field.description or model is Config):
                yield f"{model.__name__}.{name}"

    assert list(sections(Config)) == []


def test_limits_derive_from_two_sizes():
    limits = Limits(row_bytes=1000, group_bytes=500_000)
    assert limits.row_message_bytes - limits.row_bytes > HEADER_ROOM
    assert limits.dead_letter_message_bytes - limits.row_message_bytes == HEADER_ROOM
    assert limits.largest_message_bytes == limits.group_message_bytes
    assert limits.socket_request_bytes > limits.largest_message_bytes
