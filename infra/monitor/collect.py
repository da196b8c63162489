"""Reads what a snapshot needs: offsets by kafka-python, the rest as every role reads it."""

from types import TracebackType
from typing import Any, Self

from kafka import TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaError
from kafka.protocol.consumer.offsets import IsolationLevel

from infra.monitor.kafka_python import admin_client
from infra.monitor.record_counter import LetterCounter
from infra.monitor.snapshot import PartitionFacts, Snapshot, snapshot_of
from infra.screen.facts import RunFacts
from infra.status_log import StatusLog
from schemas.config import Config
from schemas.control import ControlLog
from schemas.errors import DeadlineExceeded
from schemas.manifest import require_manifest
from schemas.status import now_ms
from schemas.topics import Topics

FIRST_STATUS_S = 2.0


class Collector:
    """One thread; a context manager."""

    def __init__(self, config: Config) -> None:
        """Raises DeadlineExceeded without a broker, ManifestMismatch without such a run."""
        self._topics = Topics(config.run.id)
        client_id = f"{config.run.id}.monitor"
        self._admin: Any = admin_client(config.kafka, client_id)
        self._control = ControlLog(config.kafka, self._topics, client_id)
        self._status = StatusLog(config.kafka, self._topics, client_id)
        self._facts = RunFacts()
        self._partitions = require_manifest(self._control.read_to_end(), config).num_partitions
        self._dead_letters = LetterCounter(config.kafka, self._topics.dlq, self._partitions)
        self._hear(FIRST_STATUS_S)

    def snapshot(self) -> Snapshot:
        """Raises DeadlineExceeded when the broker does not answer."""
        self._control.poll()
        self._hear(0.0)
        heartbeats = [recent[-1] for _, recent in sorted(self._facts.heartbeats.items())]
        try:
            facts = self._partition_facts()
        except KafkaError as error:
            raise DeadlineExceeded(f"the broker did not answer the monitor: {error}") from error
        return snapshot_of(self._control.state, facts, heartbeats, now_ms())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._dead_letters.close()
        self._status.close()
        self._control.close()
        self._admin.close()

    def _hear(self, timeout_s: float) -> None:
        while heartbeats := self._status.poll(timeout_s):
            timeout_s = 0.1 if timeout_s else 0.0
            for heartbeat in heartbeats:
                self._facts.hear(heartbeat)

    def _partition_facts(self) -> list[PartitionFacts]:
        topics = self._topics
        firsts = self._offsets(topics.rows, OffsetSpec.EARLIEST)
        ends = self._offsets(topics.rows, OffsetSpec.LATEST)
        dead = self._dead_letters.counts()
        group = topics.assembler_group
        wanted = [TopicPartition(topics.rows, number) for number in range(self._partitions)]
        commits = self._admin.list_group_offsets({group: wanted}).get(group, {})
        facts = []
        for place in wanted:
            commit = commits.get(place)
            known = commit is not None and commit.offset >= 0
            number = place.partition
            facts.append(
                PartitionFacts(
                    partition=number,
                    first=firsts[number],
                    end=ends[number],
                    committed=commit.offset if known else None,
                    metadata=commit.metadata if known else "",
                    dead_letters=dead[number],
                )
            )
        return facts

    def _offsets(self, topic: str, spec: OffsetSpec) -> dict[int, int]:
        """Of what is committed."""
        specs = {TopicPartition(topic, number): spec for number in range(self._partitions)}
        found = self._admin.list_partition_offsets(
            specs, isolation_level=IsolationLevel.READ_COMMITTED
        )
        return {place.partition: offset.offset for place, offset in found.items()}
