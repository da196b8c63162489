"""A run is created once, against a real broker."""

import threading
import time
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from infra.init import control_state, init_run, run_exists
from schemas.clients import producer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.errors import ConfigError, DatasetError, ManifestMismatch
from schemas.records import Finished
from schemas.topics import CONTROL_FINISHED, Topics


@pytest.fixture
def make_config(broker, run_id, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"agent_ref": {"name": "sums"}}\n')

    def make(**kafka: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"id": run_id, "directory": str(tmp_path)},
                "kafka": {"bootstrap_servers": broker.bootstrap_servers, **kafka},
                "data": {"train_jsonl_fpath": str(prompts)},
                "policy": {"model_name": "none"},
                "env": {"agents": {"sums": {"gym": "a:B"}, "products": {"gym": "a:B"}}},
                "shards": {
                    "one": {"agents": ["sums"], "replicas": 2},
                    "two": {"agents": ["products"]},
                },
            }
        )

    return make


def write_finished(config: Config) -> None:
    producer = Producer(producer_config(config.kafka, "test"))
    record = Finished(step=12, at_ms=1)
    producer.produce(Topics(config.run.id).control, encode(record), CONTROL_FINISHED.encode())
    assert producer.flush(10) == 0


def test_creates_every_topic_and_the_manifest(make_config, broker):
    config = make_config(num_partitions=3)
    assert not run_exists(config)
    manifest = init_run(config)
    assert run_exists(config)
    assert control_state(config).manifest == manifest
    assert (manifest.num_partitions, manifest.shards) == (3, {"one": 2, "two": 1})

    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    topics = admin.list_topics(timeout=10).topics
    names = Topics(config.run.id)
    partitions = {name: len(topics[name].partitions) for name in topics if config.run.id in name}
    assert partitions == {
        names.prompts("one"): 8,
        names.prompts("two"): 4,
        names.rows: 3,
        names.groups: 3,
        names.events: 3,
        names.dlq: 3,
        names.dispatch: 1,
        names.control: 1,
        names.status: 1,
    }
    resource = ConfigResource(ResourceType.TOPIC, names.groups)
    settings = admin.describe_configs([resource])[resource].result(10)
    assert settings["retention.ms"].value == "-1"
    assert int(settings["max.message.bytes"].value) >= config.kafka.max_group_bytes


def test_again_gives_the_same_manifest(make_config):
    config = make_config()
    assert init_run(config) == init_run(config)


def test_two_at_once_make_one_run(make_config):
    config = make_config()
    manifests = []
    errors = []

    def init() -> None:
        try:
            manifests.append(init_run(config))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=init) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert manifests, errors
    written = control_state(config).manifest
    assert all(manifest == written for manifest in manifests)


def test_another_frozen_value_is_refused(make_config):
    init_run(make_config(num_partitions=3))
    with pytest.raises(ManifestMismatch, match=r"num_partitions = 3.*5"):
        init_run(make_config(num_partitions=5))


def test_another_dataset_is_refused(make_config, tmp_path):
    init_run(make_config())
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(ManifestMismatch, match="SHA-256"):
        init_run(make_config())


def test_a_missing_dataset_leaves_no_topics(make_config, tmp_path, broker):
    config = make_config()
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"prompts\.jsonl"):
        init_run(config)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    assert not [name for name in admin.list_topics(timeout=10).topics if config.run.id in name]


def test_a_lost_topic_is_an_error_not_a_new_topic(make_config, broker):
    config = make_config()
    init_run(config)
    names = Topics(config.run.id)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.delete_topics([names.groups])[names.groups].result(10)
    deadline = time.monotonic() + 20
    while names.groups in admin.list_topics(timeout=10).topics:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(ManifestMismatch, match=names.groups):
        init_run(config)


def test_a_finished_run_is_not_used_again(make_config):
    config = make_config()
    init_run(config)
    write_finished(config)
    with pytest.raises(ManifestMismatch, match="finished at step 12"):
        init_run(config)


def test_limits_that_the_broker_cannot_carry(make_config):
    config = make_config(max_group_bytes=900 * 1024 * 1024)
    with pytest.raises(ConfigError, match=r"message\.max\.bytes is \d+, the run needs 943784960"):
        init_run(config)
    assert not run_exists(config)
