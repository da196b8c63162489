"""The records on the wire, one class for each `.avsc` beside this file, with the same fields.

The schemas document every field. Token ids are little-endian int32 and log-probabilities
little-endian float32, both as bytes: `schemas.vectors` turns them into numpy arrays.
"""

from enum import StrEnum

from msgspec import Struct, field


class Purpose(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"


class FailedBy(StrEnum):
    SHARD = "shard"
    DISPATCHER = "dispatcher"


class EventKind(StrEnum):
    STARTED = "started"
    ACCEPTED = "accepted"
    ATTEMPT_FAILED = "attempt_failed"
    ABANDONED = "abandoned"
    DUPLICATE = "duplicate"
    LATE = "late"


class TaskState(StrEnum):
    DISPATCHED = "dispatched"
    WAITING = "waiting"
    CANCELLING = "cancelling"


class Record(Struct, frozen=True, kw_only=True):
    """A record of its own on a topic."""


class OfAttempt(Record, frozen=True, kw_only=True):
    """What every record about one attempt of a task begins with."""

    run_id: str
    task_index: int
    attempt: int
    group_size: int
    target_step: int
    stamp: bytes
    purpose: Purpose = Purpose.TRAIN

    @property
    def cohort(self) -> tuple[int, int]:
        return self.task_index, self.attempt


class SampledSpan(Struct, frozen=True, kw_only=True):
    model_call_id: str
    start: int
    end: int
    version_start: int
    version_end: int


class Trace(Struct, frozen=True, kw_only=True):
    trace_id: str
    model_call_ids: list[str]
    token_ids: bytes
    generation_logprobs: bytes
    sampled_spans: list[SampledSpan]


class RolloutRow(OfAttempt, frozen=True, kw_only=True):
    row_index: int
    execution_id: str
    traces: list[Trace]
    rollout_id: str
    rowidx: int
    agent: str
    shard: str
    replica: int
    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    truncated: bool = False
    failure_class: str | None = None
    turn_count: int = 1
    version_start: int
    produced_at_ms: int
    timing: dict[str, float] | None = None
    full_result: bytes | None = None

    @property
    def generation_version(self) -> int:
        """Lowest policy version of any sampled span, else the version at the row's start."""
        versions = [s.version_start for t in self.traces for s in t.sampled_spans]
        return min(versions, default=self.version_start)


class ExecutionStarted(OfAttempt, frozen=True, kw_only=True):
    execution_id: str
    shard: str
    replica: int
    version_start: int
    started_at_ms: int


class AttemptFailed(OfAttempt, frozen=True, kw_only=True):
    execution_id: str | None = None
    by: FailedBy
    reason: str
    failure_class: str
    message: str


class CancelRequested(OfAttempt, frozen=True, kw_only=True):
    reason: str


class PromptGroup(OfAttempt, frozen=True, kw_only=True):
    seq: int
    min_version: int
    alone: bool
    agent: str
    shard: str
    replica: int
    deadline_s: float
    rowidx_start: int
    rows: list[bytes]
    dispatched_at_ms: int


class TeacherLogprobs(Struct, frozen=True, kw_only=True):
    teacher: str
    row_index: int
    trace_id: str
    logprobs: bytes


class AssembledGroup(OfAttempt, frozen=True, kw_only=True):
    execution_id: str
    generation_version: int
    accepted_at_ms: int
    teacher_logprobs: list[TeacherLogprobs] = field(default_factory=list)
    rows: list[RolloutRow]


class GroupEvent(OfAttempt, frozen=True, kw_only=True):
    kind: EventKind
    execution_id: str | None = None
    reason: str = ""
    failure_class: str = ""
    message: str = ""
    shard: str = ""
    replica: int = -1
    row_index: int = -1
    rows_offset: int = -1
    generation_version: int = -1
    at_ms: int


class LedgerTask(Record, frozen=True, kw_only=True):
    task_index: int
    attempt: int
    target_step: int
    purpose: Purpose = Purpose.TRAIN
    epoch: int
    position: int
    agent: str
    shard: str
    replica: int
    partition: int
    seq: int
    min_version: int
    rowidx_start: int
    failures: int = 0
    stale_in_a_row: int = 0
    alone: bool = False
    state: TaskState = TaskState.DISPATCHED
    reason: str = ""
    dispatched_at_ms: int


class LedgerTotals(Record, frozen=True, kw_only=True):
    next_task_index: int
    epoch: int = 0
    position: int = 0
    dispatched: int = 0
    accepted: int = 0
    abandoned: dict[str, int] = field(default_factory=dict)
    failures_in_a_row: int = 0
    next_seq: dict[str, int] = field(default_factory=dict)
    next_replica: dict[str, int] = field(default_factory=dict)
    short_targets: dict[str, int] = field(default_factory=dict)
    last_target: int | None = None
    filled_slots: dict[str, bytes] = field(default_factory=dict)


class Manifest(Record, frozen=True, kw_only=True):
    run_id: str
    num_partitions: int
    num_prompts_per_step: int
    num_generations_per_prompt: int
    lead: int
    max_trajectory_age_steps: int
    dataset_hash: str
    first_step: int
    first_task_index: int
    shards: dict[str, int]
    stamp_key: bytes
    max_row_bytes: int
    max_group_bytes: int
    created_at_ms: int


class PolicyVersion(Record, frozen=True, kw_only=True):
    version: int
    weights_dir: str
    published_at_ms: int


class CheckpointRecorded(Record, frozen=True, kw_only=True):
    step: int
    directory: str
    offsets: dict[str, int]
    next_task_index: int
    recorded_at_ms: int


class TargetSize(Record, frozen=True, kw_only=True):
    target_step: int
    groups: int


class LastTarget(Record, frozen=True, kw_only=True):
    target_step: int


class NextTaskIndex(Record, frozen=True, kw_only=True):
    task_index: int


class Fatal(Record, frozen=True, kw_only=True):
    role: str
    message: str
    at_ms: int


class Finished(Record, frozen=True, kw_only=True):
    step: int
    at_ms: int


class RunningAttempt(Struct, frozen=True, kw_only=True):
    task_index: int
    attempt: int
    rows_done: int
    group_size: int
    started_at_ms: int


class Heartbeat(Record, frozen=True, kw_only=True):
    role: str
    instance: str
    incarnation: str
    pid: int
    host: str
    at_ms: int
    loop_at_ms: int
    doing: str
    doing_since_ms: int
    counters: dict[str, float] = field(default_factory=dict)
    running: list[RunningAttempt] = field(default_factory=list)
    committed_seq: dict[str, int] = field(default_factory=dict)


RECORD_TYPES: tuple[type[Record], ...] = (
    RolloutRow,
    ExecutionStarted,
    AttemptFailed,
    CancelRequested,
    PromptGroup,
    AssembledGroup,
    GroupEvent,
    LedgerTask,
    LedgerTotals,
    Manifest,
    PolicyVersion,
    CheckpointRecorded,
    TargetSize,
    LastTarget,
    NextTaskIndex,
    Fatal,
    Finished,
    Heartbeat,
)
