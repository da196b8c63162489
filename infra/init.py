"""Creates a run once: its topics, and the manifest that every other process demands.

broker's limits ─▶ topics ─▶ init_transactions ─▶ read `control` to its end ─▶ manifest

Each part can be repeated: a crash in between, or a second init at the same time, makes one run.
"""

import logging
import time

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from infra.broker_limits import shortfalls, warnings
from infra.topic_creation import cluster_settings, create_topics, partitions_by_topic
from schemas.clients import bootstrap_servers, common_config, producer_config
from schemas.codec import encode
from schemas.config import Config
from schemas.control import ControlLog, ControlState
from schemas.errors import ConfigError, DeadlineExceeded, ManifestMismatch
from schemas.manifest import manifest_of, require_dataset, require_manifest
from schemas.records import Manifest
from schemas.topics import CONTROL_MANIFEST, Topics, TopicSpec

ANSWER_S = 20.0
WRITE_S = 30.0

log = logging.getLogger(__name__)


def init_run(config: Config) -> Manifest:
    """The manifest of the run, created now or, with equal frozen values, earlier.

    Raises ConfigError where the broker's limits are too small, ManifestMismatch where the run
    exists with other values, lacks a topic or has finished, DeadlineExceeded without an answer.
    """
    topics = Topics(config.run.id)
    admin = connected_admin(config)
    _require_limits(admin, config)
    specs = _specs(config, topics)
    existing = partitions_by_topic(admin, ANSWER_S)
    if topics.control in existing:
        state = control_state(config)
        if state.manifest is not None:
            return _continued(config, state, specs, existing)
    new_manifest = manifest_of(config)  # first: an unreadable dataset must not leave topics behind
    _require_partitions([spec for spec in specs if spec.name in existing], existing)
    missing = [spec for spec in specs if spec.name not in existing]
    create_topics(admin, missing, config.kafka.replication_factor)
    log.info("created %d topics of run %s", len(missing), config.run.id)
    return _write_once(config, topics, new_manifest)


def run_exists(config: Config) -> bool:
    """Whether the cluster knows the run: its manifest is on `control`."""
    admin = connected_admin(config)
    if Topics(config.run.id).control not in partitions_by_topic(admin, ANSWER_S):
        return False
    return control_state(config).manifest is not None


def control_state(config: Config) -> ControlState:
    """What `control` says now. The topic must exist."""
    control = ControlLog(config.kafka, Topics(config.run.id), f"{config.run.id}.init")
    try:
        return control.read_to_end()
    finally:
        control.close()


def connected_admin(config: Config) -> AdminClient:
    """An admin client whose cluster answers. Raises DeadlineExceeded."""
    admin = AdminClient(common_config(config.kafka, f"{config.run.id}.init"))
    try:
        admin.list_topics(timeout=ANSWER_S)
    except KafkaException as error:
        raise DeadlineExceeded(
            f"no Kafka broker answers at {bootstrap_servers(config.kafka)} within {ANSWER_S:.0f} s "
            f"({error.args[0].str()}): start it, or correct kafka.bootstrap_servers"
        ) from error
    return admin


def _require_limits(admin: AdminClient, config: Config) -> None:
    settings = cluster_settings(admin, ANSWER_S)
    if settings is None:
        log.warning("the cluster does not show its settings to us: its limits are not checked")
        return
    if found := shortfalls(settings, config.kafka):
        raise ConfigError("\n".join(found))
    for warning in warnings(settings):
        log.warning("%s", warning)


def _specs(config: Config, topics: Topics) -> list[TopicSpec]:
    shards = {name: shard.replicas for name, shard in config.all_shards.items()}
    return topics.specs(config.kafka.num_partitions, shards, config.kafka.limits)


def _continued(
    config: Config, state: ControlState, specs: list[TopicSpec], existing: dict[str, int]
) -> Manifest:
    manifest = require_manifest(state, config)
    if state.finished is not None:
        raise ManifestMismatch(
            f"run {config.run.id} finished at step {state.finished.step}, and a run id is never "
            "reused: choose another run.id"
        )
    require_dataset(manifest, config)
    gone = [spec.name for spec in specs if spec.name not in existing]
    if gone:
        raise ManifestMismatch(
            f"run {config.run.id} has lost its topics {gone}: what they held is gone, so it cannot "
            "go on; start a new run under another run.id"
        )
    _require_partitions(specs, existing)
    log.info("run %s exists with the same frozen values", config.run.id)
    return manifest


def _require_partitions(specs: list[TopicSpec], existing: dict[str, int]) -> None:
    for spec in specs:
        if existing[spec.name] != spec.partitions:
            raise ManifestMismatch(
                f"topic {spec.name} has {existing[spec.name]} partitions, the configuration makes "
                f"{spec.partitions}: restore the old number, or start a new run under another "
                "run.id"
            )


def _write_once(config: Config, topics: Topics, manifest: Manifest) -> Manifest:
    """Fences a concurrent init first, then reads whether that one had written the manifest."""
    client_id = f"{topics.run_id}.init"
    producer = Producer(producer_config(config.kafka, client_id, topics.transactional_id("init")))
    deadline = time.monotonic() + WRITE_S
    try:
        producer.init_transactions(WRITE_S)
        state = control_state(config)
        if state.manifest is not None:
            return require_manifest(state, config)
        producer.begin_transaction()
        producer.produce(topics.control, encode(manifest), CONTROL_MANIFEST.encode(), partition=0)
        producer.commit_transaction(max(1.0, deadline - time.monotonic()))
    except KafkaException as error:
        raise DeadlineExceeded(
            f"the manifest of run {config.run.id} was not written within {WRITE_S:.0f} s "
            f"({error.args[0].str()}): try again; if it happens again, look into the broker's log"
        ) from error
    log.info("run %s is ready", config.run.id)
    return manifest
