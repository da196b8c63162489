"""One attempt of one prompt group: its gym runs, each row is sent the moment it is done.

    ExecutionStarted ─▶ row ─▶ row ─▶ ... ─▶ row (with timing)        all G rows: done
                                 └─ anything wrong ─▶ AttemptFailed    none of them is trained

The gym runs in a task of its own and never waits for Kafka, so its clock is rollout time only.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from producers.failure import EXPECTED, GymMisbehaved, described, failure_of
from producers.gym_stream import STOP_S, GymStream
from producers.gyms.protocol import Gym, RolloutRequest, RolloutResult, Timing
from producers.row import RowOptions, attempt_failed, identity_of, rollout_request, rollout_row
from producers.row_sink import Delivery, DeliveryFailed
from schemas.records import ExecutionStarted, OfAttempt, PromptGroup, RolloutRow, RunningAttempt
from schemas.status import now_ms

logger = logging.getLogger(__name__)


class Sink(Protocol):
    async def send(self, record: OfAttempt) -> Delivery:
        """Sends a record in order; what is returned resolves when it is safe.

        Raises RowRejected and RecordTooLarge before anything is sent, and DeliveryFailed.
        """
        ...


@dataclass(frozen=True)
class Replica:
    """Who executes."""

    shard: str
    number: int


class Execution:
    """Runs once. `rows_done`, `sampled_tokens` and `running()` may be read meanwhile."""

    def __init__(
        self,
        group: PromptGroup,
        gym: Gym,
        sink: Sink,
        replica: Replica,
        options: RowOptions,
        *,
        version: int,
    ) -> None:
        self.group = group
        self.rows_done = 0
        self.sampled_tokens = 0
        self.started = ExecutionStarted(
            **identity_of(group),
            execution_id=secrets.token_hex(16),
            shard=replica.shard,
            replica=replica.number,
            version_start=version,
            started_at_ms=now_ms(),
        )
        self._gym = gym
        self._sink = sink
        self._options = options
        self._seen: set[int] = set()
        self._deliveries: list[Delivery] = []

    def running(self) -> RunningAttempt:
        return RunningAttempt(
            task_index=self.group.task_index,
            attempt=self.group.attempt,
            rows_done=self.rows_done,
            group_size=self.group.group_size,
            started_at_ms=self.started.started_at_ms,
        )

    async def run(self) -> bool:
        """True when all rows are on the topic, False when AttemptFailed is.

        Raises DeliveryFailed, where not even that could be said. Cancelled, it says nothing: the
        dispatcher sees that the shard's process ended.
        """
        try:
            await self._roll_out()
            await asyncio.gather(*self._deliveries)
        except DeliveryFailed:
            raise
        except Exception as error:
            await self._fail(error)
            return False
        return True

    async def _roll_out(self) -> None:
        self._deliveries.append(await self._sink.send(self.started))
        request = rollout_request(self.group)
        stream = GymStream(self._gym, request, self._who())
        try:
            async for item in stream:
                await self._send_row(request, *_checked(item))
                if self._is_complete():
                    break
            else:
                missing = sorted(set(range(self.group.group_size)) - self._seen)
                raise GymMisbehaved(f"the gym ended without rows {missing}")
        finally:
            await stream.close(may_end_s=STOP_S if self._is_complete() else 0.0)

    def _is_complete(self) -> bool:
        return len(self._seen) == self.group.group_size

    async def _send_row(
        self, request: RolloutRequest, row_index: Any, result: RolloutResult, timing: Timing | None
    ) -> None:
        size = self.group.group_size
        if type(row_index) is not int or not 0 <= row_index < size:
            raise GymMisbehaved(f"the gym gave row {row_index!r}, expected are 0..{size - 1}")
        if row_index in self._seen:
            raise GymMisbehaved(f"the gym gave row {row_index} twice")
        if timing is not None and len(self._seen) + 1 < size:
            raise GymMisbehaved(
                f"the gym gave timing with row {row_index}, number {len(self._seen) + 1} of "
                f"{size}; it belongs to the last one"
            )
        row = rollout_row(
            self.group,
            self.started,
            row_index,
            request.rollout_ids[row_index],
            result,
            timing=timing,
            produced_at_ms=now_ms(),
            options=self._options,
        )
        self._deliveries.append(await self._sink.send(row))
        self._seen.add(row_index)
        self.rows_done += 1
        self.sampled_tokens += sampled_tokens(row)

    async def _fail(self, error: Exception) -> None:
        reason, failure_class = failure_of(error)
        message = f"{self._who()}: {described(error)}"
        logger.warning(
            "attempt failed (%s, %s): %s",
            reason,
            failure_class,
            message,
            exc_info=None if isinstance(error, EXPECTED) else error,
        )
        word = attempt_failed(
            self.group,
            execution_id=self.started.execution_id,
            reason=reason,
            failure_class=failure_class,
            message=message,
        )
        await (await self._sink.send(word))

    def _who(self) -> str:
        return (
            f"task {self.group.task_index} attempt {self.group.attempt}, agent {self.group.agent} "
            f"on {self.started.shard}/{self.started.replica}"
        )


def _checked(item: Any) -> tuple[Any, RolloutResult, Timing | None]:
    if not isinstance(item, tuple) or len(item) != 3 or not isinstance(item[1], RolloutResult):
        raise GymMisbehaved(
            f"the gym gave {item!r:.200}, expected is (row index, RolloutResult, timing or None)"
        )
    return item


def sampled_tokens(row: RolloutRow) -> int:
    return sum(span.end - span.start for trace in row.traces for span in trace.sampled_spans)
