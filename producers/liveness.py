"""Which attempts are believed lost. Pure: heartbeats and a monotonic clock come in as arguments.

    started, and the deadline passed                                  ─▶ deadline
    started, and its process was silent for 10 s, or was replaced     ─▶ shard_lost
    its offset is committed, yet it neither started nor runs: for 3 s
    of its shard's heartbeats, or for 10 s of silence                 ─▶ lost_start

What it says is a request that is ignored for a complete group, so being wrong costs one attempt,
never a row. Silence counts only up to when the dispatcher last heard itself on `status`: its own
heartbeat, fresh, proves that the broker takes and serves heartbeats and that `status` was read to
its end. After a gap in that proof it counts anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from producers.decisions import RequestFailure
from schemas.records import Heartbeat, LedgerTask, TaskState

SILENCE_S = 10.0
LOST_START_S = 3.0  # three heartbeats that do not list it
PROOF_S = 3.0  # three of our own heartbeats
DEADLINE_GRACE_S = 2.0  # the shard keeps the same deadline, and says better what did not end
SHARD_ROLE = "gym-shard"


@dataclass
class Replica:
    """What the heartbeats of `<shard>/<number>` said last."""

    name: str
    incarnation: str
    seen_s: float
    committed_seq: dict[str, int] = field(default_factory=dict)
    running: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Attempt:
    """What is known of the current attempt of a task, since this process began."""

    number: int
    started_s: float | None = None
    executor: str | None = None
    incarnation: str | None = None
    idle_since_s: float | None = None
    reported: bool = False


class Liveness:
    """One for each life of the dispatcher; after a restart everything is seen anew."""

    def __init__(self, own_incarnation: str, deadline_s: float, now_s: float) -> None:
        self._own = own_incarnation
        self._deadline_s = deadline_s
        self._replicas: dict[str, Replica] = {}
        self._attempts: dict[int, Attempt] = {}
        self._proof_s = now_s - PROOF_S
        self._checked_s = now_s

    def heard(self, heartbeat: Heartbeat, *, now_s: float, now_ms: int) -> None:
        """A heartbeat was read. `now_ms` is this host's wall clock, which wrote our own."""
        if heartbeat.incarnation == self._own:
            # One from the future is from before our clock was set back: it may be old as well.
            if 0 <= now_ms - heartbeat.at_ms <= PROOF_S * 1000:
                self._proof_s = now_s
        elif heartbeat.role == SHARD_ROLE:
            self._replicas[heartbeat.instance] = Replica(
                heartbeat.instance,
                heartbeat.incarnation,
                now_s,
                heartbeat.committed_seq,
                frozenset((r.task_index, r.attempt) for r in heartbeat.running),
            )

    def started(self, task: LedgerTask, executor: str, *, now_s: float, live: bool) -> None:
        """The current attempt of `task` began on `executor` (`<shard>/<number>`).

        Not `live`: the event is from before this process, so the process that began it may be
        gone; only a heartbeat that lists it as running says otherwise.
        """
        attempt = self._attempt(task)
        attempt.started_s = now_s
        if live and executor in self._replicas:
            attempt.executor = executor
            attempt.incarnation = self._replicas[executor].incarnation

    def failures(self, tasks: Iterable[LedgerTask], now_s: float) -> list[RequestFailure]:
        """Each lost attempt once. `tasks` are all outstanding ones."""
        gap = now_s - self._checked_s > PROOF_S or now_s - self._proof_s > PROOF_S
        self._checked_s = now_s
        dispatched = {t.task_index: t for t in tasks if t.state is TaskState.DISPATCHED}
        for ended in self._attempts.keys() - dispatched.keys():
            del self._attempts[ended]
        if gap:
            self._restart_silence(now_s)
            return []
        return list(self._lost(dispatched.values(), now_s))

    def _restart_silence(self, now_s: float) -> None:
        for replica in self._replicas.values():
            replica.seen_s = now_s
        for attempt in self._attempts.values():
            attempt.idle_since_s = None

    def _lost(self, tasks: Iterable[LedgerTask], now_s: float) -> Iterator[RequestFailure]:
        by_shard: dict[str, list[Replica]] = {}
        for replica in self._replicas.values():
            by_shard.setdefault(replica.name.rpartition("/")[0], []).append(replica)
        for task in tasks:
            attempt = self._attempt(task)
            replicas = by_shard.get(task.shard, [])
            self._note_running(task, attempt, replicas, now_s)
            if attempt.reported:
                continue
            found = self._overdue(attempt, now_s) or (
                self._executor_lost(attempt)
                if attempt.executor
                else self._start_lost(task, attempt, replicas)
            )
            if found:
                attempt.reported = True
                reason, message = found
                yield RequestFailure(task, reason, message)

    def _attempt(self, task: LedgerTask) -> Attempt:
        attempt = self._attempts.get(task.task_index)
        if attempt is None or attempt.number != task.attempt:
            attempt = self._attempts[task.task_index] = Attempt(task.attempt)
        return attempt

    def _note_running(
        self, task: LedgerTask, attempt: Attempt, replicas: list[Replica], now_s: float
    ) -> None:
        """A heartbeat that lists the attempt is as good as the event that it started."""
        if attempt.executor is not None:
            return
        for replica in replicas:
            if (task.task_index, task.attempt) in replica.running:
                attempt.executor, attempt.incarnation = replica.name, replica.incarnation
                if attempt.started_s is None:
                    attempt.started_s = now_s

    def _overdue(self, attempt: Attempt, now_s: float) -> tuple[str, str] | None:
        limit_s = self._deadline_s + DEADLINE_GRACE_S
        if attempt.started_s is None or now_s - attempt.started_s <= limit_s:
            return None
        return "deadline", f"not complete {now_s - attempt.started_s:.0f} s after its start"

    def _executor_lost(self, attempt: Attempt) -> tuple[str, str] | None:
        replica = self._replicas[str(attempt.executor)]
        if replica.incarnation != attempt.incarnation:
            return "shard_lost", f"the process of {replica.name} that ran it was replaced"
        if self._proof_s - replica.seen_s > SILENCE_S:
            return "shard_lost", f"{replica.name}, which ran it, was silent for {SILENCE_S:.0f} s"
        return None

    def _start_lost(
        self, task: LedgerTask, attempt: Attempt, replicas: list[Replica]
    ) -> tuple[str, str] | None:
        partition = str(task.partition)
        committed = max((r.committed_seq.get(partition, -1) for r in replicas), default=-1)
        if committed < task.seq:
            attempt.idle_since_s = None
            return None
        if attempt.idle_since_s is None:
            attempt.idle_since_s = self._proof_s
        heard_s = min(self._proof_s, max(replica.seen_s for replica in replicas))
        spoke_without_it = heard_s - attempt.idle_since_s > LOST_START_S
        if not spoke_without_it and self._proof_s - attempt.idle_since_s <= SILENCE_S:
            return None
        return (
            "lost_start",
            f"its offset is committed (sequence {task.seq} of partition {partition} of "
            f"{task.shard}), but for {self._proof_s - attempt.idle_since_s:.0f} s no process said "
            "that it runs",
        )
