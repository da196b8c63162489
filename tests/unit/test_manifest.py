import pytest

from schemas.config_file import parse_config
from schemas.control import ControlState
from schemas.errors import DatasetError, ManifestMismatch
from schemas.manifest import manifest_of, require_dataset, require_manifest


@pytest.fixture
def config(tmp_path):
    (tmp_path / "data.jsonl").write_text("{}\n")
    return parse_config(
        {
            "run": {"id": "r1"},
            "data": {"train_jsonl_fpath": str(tmp_path / "data.jsonl")},
            "policy": {"model_name": "model"},
            "env": {"agents": {"sums": {"gym": "m:C"}}},
        },
        "test",
    )


def test_the_same_configuration_agrees_with_its_manifest(config):
    manifest = manifest_of(config)
    require_dataset(manifest, config)
    assert require_manifest(ControlState(manifest=manifest), config) is manifest


def test_a_frozen_value_that_changed_is_named_with_both_values(config):
    state = ControlState(manifest=manifest_of(config))
    kafka = config.kafka.model_copy(update={"num_partitions": 9})
    with pytest.raises(ManifestMismatch, match="num_partitions = 4, this file says 9"):
        require_manifest(state, config.model_copy(update={"kafka": kafka}))


def test_no_manifest_says_what_to_run(config):
    with pytest.raises(ManifestMismatch, match="groupstream-init"):
        require_manifest(ControlState(), config)


def test_another_dataset_is_named(config, tmp_path):
    manifest = manifest_of(config)
    (tmp_path / "data.jsonl").write_text("{ }\n")
    with pytest.raises(ManifestMismatch, match="SHA-256"):
        require_dataset(manifest, config)
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(DatasetError, match="No such file"):
        require_dataset(manifest, config)
