"""Topics and settings of a cluster, through the admin client."""

import time

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from schemas.errors import ConfigError, DeadlineExceeded
from schemas.topics import TopicSpec

CREATE_S = 60.0
POLL_S = 0.05


def partitions_by_topic(admin: AdminClient, timeout_s: float) -> dict[str, int]:
    """Every topic of the cluster and its number of partitions."""
    topics = admin.list_topics(timeout=timeout_s).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}


def cluster_settings(admin: AdminClient, timeout_s: float) -> dict[str, str | None] | None:
    """Settings of one broker of the cluster; None where we may not read them."""
    broker = str(min(admin.list_topics(timeout=timeout_s).brokers))
    resource = ConfigResource(ResourceType.BROKER, broker)
    future = admin.describe_configs([resource], request_timeout=timeout_s)[resource]
    try:
        entries = future.result(timeout_s)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            return None
        raise
    return {name: entry.value for name, entry in entries.items()}


def create_topics(admin: AdminClient, specs: list[TopicSpec], replication_factor: int) -> None:
    """Creates them and waits until each has leaders; one that exists already is left as it is.

    Raises ConfigError with the broker's reason, DeadlineExceeded after CREATE_S.
    """
    if not specs:
        return
    wanted = [
        NewTopic(
            spec.name,
            num_partitions=spec.partitions,
            replication_factor=replication_factor,
            config=spec.config,
        )
        for spec in specs
    ]
    futures = admin.create_topics(wanted, operation_timeout=CREATE_S, request_timeout=CREATE_S)
    for name, future in futures.items():
        try:
            future.result(CREATE_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ConfigError(
                    f"topic {name} could not be created: {error.args[0].str()} "
                    f"(kafka.replication_factor is {replication_factor})"
                ) from error
    _wait_for_leaders(admin, specs)


def _wait_for_leaders(admin: AdminClient, specs: list[TopicSpec]) -> None:
    """A produce to a partition without a leader would fail at once."""
    deadline = time.monotonic() + CREATE_S
    waiting = {spec.name for spec in specs}
    while waiting:
        topics = admin.list_topics(timeout=CREATE_S).topics
        waiting = {
            name
            for name in waiting
            if name not in topics
            or not topics[name].partitions
            or any(partition.leader < 0 for partition in topics[name].partitions.values())
        }
        if waiting and time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"topics {sorted(waiting)} have no leader within {CREATE_S:.0f} s of their "
                "creation: look into the broker's log"
            )
        if waiting:
            time.sleep(POLL_S)
