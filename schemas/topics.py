"""Names, partitions and settings of a run's topics."""

from dataclasses import dataclass

from schemas.limits import Limits

PARTITIONS_PER_REPLICA = 4

CONTROL_MANIFEST = "manifest"
CONTROL_POLICY = "policy"
CONTROL_CHECKPOINT = "checkpoint"
CONTROL_LAST_TARGET = "last_target"
CONTROL_NEXT_TASK_INDEX = "next_task_index"
CONTROL_FATAL = "fatal"
CONTROL_FINISHED = "finished"
CONTROL_TARGET = "target/"
LEDGER_TOTALS = "totals"

DLQ_REASON = "groupstream.reason"
DLQ_MESSAGE = "groupstream.message"
DLQ_TOPIC = "groupstream.topic"
DLQ_PARTITION = "groupstream.partition"
DLQ_OFFSET = "groupstream.offset"
# A record of `dlq` with the first of these is no letter: it marks one of its partition as resolved.
DLQ_RESOLUTION = "groupstream.resolution"
DLQ_RESOLVED_OFFSET = "groupstream.resolved_offset"
DLQ_REPLAY_PARTITION = "groupstream.replay_partition"
DLQ_REPLAY_OFFSET = "groupstream.replay_offset"


@dataclass(frozen=True)
class TopicSpec:
    name: str
    partitions: int
    config: dict[str, str]


@dataclass(frozen=True)
class Topics:
    """All names carry the run."""

    run_id: str

    def prompts(self, shard: str) -> str:
        return f"{self.run_id}.prompts.{shard}"

    @property
    def rows(self) -> str:
        return f"{self.run_id}.rows"

    @property
    def groups(self) -> str:
        return f"{self.run_id}.groups"

    @property
    def events(self) -> str:
        return f"{self.run_id}.events"

    @property
    def dispatch(self) -> str:
        return f"{self.run_id}.dispatch"

    @property
    def control(self) -> str:
        return f"{self.run_id}.control"

    @property
    def status(self) -> str:
        return f"{self.run_id}.status"

    @property
    def dlq(self) -> str:
        return f"{self.run_id}.dlq"

    @property
    def assembler_group(self) -> str:
        return f"{self.run_id}.assembler"

    @property
    def dispatcher_group(self) -> str:
        return f"{self.run_id}.dispatcher"

    def shard_group(self, shard: str) -> str:
        return f"{self.run_id}.gym-shard.{shard}"

    def transactional_id(self, role: str, instance: str = "") -> str:
        return f"{self.run_id}.{role}.{instance}" if instance else f"{self.run_id}.{role}"

    def specs(self, num_partitions: int, shards: dict[str, int], limits: Limits) -> list[TopicSpec]:
        """Every topic of the run. Topics that hold the run's truth are never cleaned by age.

        The broker stamps the records: by a sender's own clock, one that is a week behind would
        have its rows deleted unread, and one that is an hour ahead would be refused.
        """
        stamped = {"message.timestamp.type": "LogAppendTime"}
        kept = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"} | stamped
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"} | stamped
        row_size = {"max.message.bytes": str(limits.row_message_bytes)}
        letter_size = {"max.message.bytes": str(limits.dead_letter_message_bytes)}
        group_size = {"max.message.bytes": str(limits.group_message_bytes)}
        week = {"cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)} | stamped
        brief = {
            "cleanup.policy": "compact,delete",
            "retention.ms": str(24 * 3600 * 1000),
            "segment.ms": "600000",
        } | stamped
        prompts = [
            TopicSpec(self.prompts(shard), replicas * PARTITIONS_PER_REPLICA, kept | row_size)
            for shard, replicas in sorted(shards.items())
        ]
        return [
            *prompts,
            TopicSpec(self.rows, num_partitions, week | row_size),
            TopicSpec(self.groups, num_partitions, kept | group_size),
            TopicSpec(self.events, num_partitions, kept),
            TopicSpec(self.dispatch, 1, compacted),
            TopicSpec(self.control, 1, compacted),
            TopicSpec(self.status, 1, brief),
            TopicSpec(self.dlq, num_partitions, week | letter_size),
        ]
