"""The consumer of `prompts.<shard>`: reads ahead, and commits a prompt's offset before its start.

        event loop                                         consumer thread
    on_prompt, on_drop ◀──── prompts, lost partitions ──── poll
    commit(prompt) ──────── request ─────────────────────▶ commit, synchronously
              ◀──────────── Committed ───────────────────────┘

The offset that is committed says "the prompt below it may have been started", so an attempt starts
at most once: who commits it starts it, and whoever reads the partition afterwards begins above it.
The consumer is a static member of its group: a restarted replica has its partitions back at once
(in a KIP-848 group once the session of its predecessor has ended), and a predecessor that still
lives is fenced.
"""

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition

from producers.start_order import Prompt
from schemas.clients import consumer_config
from schemas.codec import decode_as
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded, Fenced, OffsetsLost, RecordUnreadable
from schemas.records import PromptGroup
from schemas.topics import Topics

logger = logging.getLogger(__name__)

IDLE_S = 0.01  # how long a prompt may lie in the consumer's queue, and a request in ours
READ_AHEAD = 64  # prompts of a partition that wait in memory; above it the partition is paused
READ_BACK_S = 60.0
READ_BACK_RETRY_S = 0.5
PREDECESSOR_S = 120.0  # a session of a KIP-848 group takes 45 s by the broker's default
PREDECESSOR_RETRY_S = 1.0
_FENCED = (KafkaError.FENCED_INSTANCE_ID, KafkaError._FENCED)
_FATAL = (*_FENCED, KafkaError._FATAL)


class Committed(Enum):
    """What became of a prompt's offset."""

    YES = "yes"  # start it
    UNKNOWN = "unknown"  # committed by us, without an answer: nobody starts it, so it must fail
    NO = "no"  # not ours any more, or read again: forget it


@dataclass(frozen=True)
class _Request:
    prompt: Prompt
    answer: Future[Committed]


@dataclass
class _Assigned:
    """One partition that is ours. `waiting`: prompts given out and not committed yet."""

    epoch: int
    waiting: int = 0
    paused: bool = False


class PromptSource:
    """Start it from an event loop, and await `failed`: the thread's error, if it ends with one."""

    def __init__(
        self,
        kafka: KafkaConfig,
        topics: Topics,
        shard: str,
        replica: int,
        *,
        on_prompt: Callable[[Prompt], None],
        on_drop: Callable[[int], None],
        on_committed_seq: Callable[[int, int], None],
    ) -> None:
        """The callbacks run on the event loop: `on_drop(partition)` takes back what was given of
        a partition, `on_committed_seq(partition, seq)` tells the highest committed sequence."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._topic = topics.prompts(shard)
        self._group = topics.shard_group(shard)
        self._name = f"{shard}/{replica}"
        self._settings: dict[str, Any] = consumer_config(
            kafka, f"{topics.run_id}.gym-shard.{shard}.{replica}.prompts", self._group
        ) | {"group.instance.id": f"{shard}-{replica}"}
        self._on_prompt, self._on_drop = on_prompt, on_drop
        self._on_committed_seq = on_committed_seq
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._assigned: dict[int, _Assigned] = {}
        self._epoch = 0
        self._token = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)
        self._thread.start()

    @property
    def partitions(self) -> list[int]:
        """The partitions that are ours now."""
        return sorted(self._assigned)

    async def commit(self, prompt: Prompt) -> Committed:
        """Call it for the prompts of a partition in the order in which they were given."""
        request = _Request(prompt, Future())
        self._requests.put(request)
        return await asyncio.wrap_future(request.answer)

    async def close(self, deadline_s: float) -> None:
        """Commits nothing more. Raises DeadlineExceeded."""
        self._closing.set()
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the consumer of {self._topic} did not close within {deadline_s:g} s"
            )

    # From here on: the consumer thread.

    def _run(self) -> None:
        until_s = time.monotonic() + PREDECESSOR_S
        try:
            while not self._closing.is_set() and not self._served(until_s):
                self._closing.wait(PREDECESSOR_RETRY_S)
        except Exception as error:
            self._tell(self._fail, _acted_on(error, self._topic, self._name))

    def _served(self, until_s: float) -> bool:
        """One consumer, until close(). False where a predecessor's session must end first.

        KIP-848 only: a classic group gives the place of a static member to its newest process.
        """
        self._consumer = Consumer(self._settings)
        try:
            self._follow()
            return True
        except KafkaException as error:
            was_member = self._epoch > 0
            if was_member or not _is_taken(error.args[0]):
                raise
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"another process was gym shard {self._name} for {PREDECESSOR_S:g} s, and "
                    f"still is: {error.args[0].str()}"
                ) from error
            logger.warning("%s waits for its predecessor's session to end", self._name)
            return False
        finally:
            self._consumer.close()

    def _follow(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._revoke
        )
        while not self._closing.is_set():
            while (message := self._consumer.poll(0)) is not None:
                self._receive(message)
            try:
                request = self._requests.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            self._carry_out(request)

    def _receive(self, message: Any) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise OffsetsLost(
                    f"{self._topic}: {error.str()}: its prompts were deleted before {self._name} "
                    "read them; nothing is skipped on our own, so start a new run"
                )
            if error.fatal() or error.code() in _FATAL:
                raise KafkaException(error)
            logger.warning("%s: %s", self._topic, error)  # librdkafka goes on by itself
            return
        partition = message.partition()
        assigned = self._assigned.get(partition)
        if assigned is None:  # fetched before the partition was revoked
            return
        self._tell(
            self._on_prompt,
            Prompt(partition, message.offset(), assigned.epoch, self._group_of(message)),
        )
        assigned.waiting += 1
        if assigned.waiting >= READ_AHEAD and not assigned.paused:
            self._consumer.pause([TopicPartition(self._topic, partition)])
            assigned.paused = True

    def _group_of(self, message: Any) -> PromptGroup:
        try:
            return decode_as(message.value(), PromptGroup)
        except RecordUnreadable as error:
            raise RecordUnreadable(
                error.reason,
                f"{self._topic} partition {message.partition()} offset {message.offset()}: {error}",
            ) from error

    def _carry_out(self, request: _Request) -> None:
        """Answers in any case, so that nobody waits for a thread that ended."""
        if not request.answer.set_running_or_notify_cancel():
            return  # nobody would start it
        try:
            committed = self._commit(request.prompt)
        except BaseException as error:
            request.answer.set_exception(_acted_on(error, self._topic, self._name))
            raise
        if committed is not Committed.NO:
            self._tell(self._on_committed_seq, request.prompt.partition, request.prompt.group.seq)
        request.answer.set_result(committed)

    def _commit(self, prompt: Prompt) -> Committed:
        assigned = self._assigned.get(prompt.partition)
        if assigned is None or assigned.epoch != prompt.epoch:
            return Committed.NO
        assigned.waiting -= 1
        if assigned.paused and assigned.waiting <= READ_AHEAD // 2:
            self._consumer.resume([TopicPartition(self._topic, prompt.partition)])
            assigned.paused = False
        above = TopicPartition(
            self._topic,
            prompt.partition,
            prompt.offset + 1,
            metadata=_metadata(prompt.group.seq, self._token),
        )
        try:
            answered = self._consumer.commit(offsets=[above], asynchronous=False)
            failed = next((p.error for p in answered or [] if p.error is not None), None)
            if failed is None:
                return Committed.YES
            raise KafkaException(failed)
        except KafkaException as error:
            if _ends_the_client(error):
                raise
            logger.warning(
                "the commit of offset %d of %s partition %d failed, reading it back: %s",
                prompt.offset + 1,
                self._topic,
                prompt.partition,
                error,
            )
        return self._read_back(prompt)

    def _read_back(self, prompt: Prompt) -> Committed:
        """What a commit that gave an error did all the same."""
        (found,) = self._committed([TopicPartition(self._topic, prompt.partition)])
        if found.offset > prompt.offset:
            # What another one committed, it starts: only our own commit leaves a prompt to nobody.
            ours = found.offset == prompt.offset + 1 and _token_of(found) == self._token
            return Committed.UNKNOWN if ours else Committed.NO
        if (message := self._consumer.poll(0)) is not None:  # and the rebalance that has arrived
            self._receive(message)
        assigned = self._assigned.get(prompt.partition)
        if assigned is not None and assigned.epoch == prompt.epoch:
            self._take_back(prompt)
        return Committed.NO

    def _take_back(self, prompt: Prompt) -> None:
        """Reads the partition again from `prompt` on."""
        self._epoch += 1
        self._assigned[prompt.partition] = _Assigned(self._epoch)
        self._tell(self._on_drop, prompt.partition)
        self._consumer.seek(TopicPartition(self._topic, prompt.partition, prompt.offset))
        self._consumer.resume([TopicPartition(self._topic, prompt.partition)])

    def _committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Raises DeadlineExceeded: an error is never "no commit"."""
        ends_s = time.monotonic() + READ_BACK_S
        while True:
            try:
                answered: list[TopicPartition] = self._consumer.committed(partitions, timeout=10)
                failed = next((p.error for p in answered if p.error is not None), None)
                if failed is None:
                    return answered
                raise KafkaException(failed)
            except KafkaException as error:
                if _ends_the_client(error):
                    raise
                if time.monotonic() > ends_s or self._closing.is_set():
                    raise DeadlineExceeded(
                        f"the committed offsets of group {self._group} on {self._topic} could not "
                        f"be read within {READ_BACK_S:g} s: {error}"
                    ) from error
                logger.warning("reading the commits of %s again: %s", self._group, error)
                time.sleep(READ_BACK_RETRY_S)

    def _assign(self, _consumer: Any, partitions: list[TopicPartition]) -> None:
        if not partitions:
            self._consumer.incremental_assign([])
            return
        begin = []
        for committed in self._committed(partitions):
            self._epoch += 1
            self._assigned[committed.partition] = _Assigned(self._epoch)
            begin.append(self._beginning(committed))
        self._consumer.incremental_assign(begin)
        logger.info("%s reads partitions %s of %s", self._name, self.partitions, self._topic)

    def _beginning(self, committed: TopicPartition) -> TopicPartition:
        """Raises OffsetsLost: without a commit everything from offset 0 on must still be there."""
        if committed.offset != OFFSET_INVALID:
            seq = _seq_of(committed)
            if seq is not None:
                self._tell(self._on_committed_seq, committed.partition, seq)
            return TopicPartition(self._topic, committed.partition, committed.offset)
        partition = TopicPartition(self._topic, committed.partition, 0)
        low, _ = self._consumer.get_watermark_offsets(partition, timeout=READ_BACK_S)
        if low > 0:
            raise OffsetsLost(
                f"group {self._group} has no commit for partition {committed.partition} of "
                f"{self._topic}, which begins at offset {low}: which of its prompts were started "
                "is unknown, so start a new run"
            )
        return partition

    def _revoke(self, _consumer: Any, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            if self._assigned.pop(partition.partition, None) is not None:
                self._tell(self._on_drop, partition.partition)
        self._consumer.incremental_unassign(partitions)
        logger.info("%s reads partitions %s of %s", self._name, self.partitions, self._topic)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def _metadata(seq: int, token: str) -> str:
    """Of a commit: a restarted replica knows at once which prompts were covered, and a commit
    without an answer is recognised by the process that made it."""
    return f"{seq} {token}"


def _seq_of(committed: TopicPartition) -> int | None:
    seq = (committed.metadata or "").partition(" ")[0]
    return int(seq) if seq.isdigit() else None


def _token_of(committed: TopicPartition) -> str:
    return (committed.metadata or "").rstrip("\0").partition(" ")[2]


def _ends_the_client(error: KafkaException) -> bool:
    return error.args[0].code() in _FATAL or error.args[0].fatal()


def _is_taken(error: KafkaError) -> bool:
    """UNRELEASED_INSTANCE_ID, which arrives as _FATAL, with its cause in words only."""
    return "instance ID is still used" in error.str()


def _acted_on(error: BaseException, topic: str, name: str) -> BaseException:
    """Fenced for a fenced client, so that the process ends as one."""
    if isinstance(error, KafkaException) and _ends_the_client(error):
        cause = error.args[0]
        # What follows a fatal error carries the code _FATAL, and its cause in words only.
        if cause.code() in _FENCED or "fenced" in cause.str().lower() or _is_taken(cause):
            return Fenced(
                f"a newer process is gym shard {name} now and reads {topic}; this one ends: {cause}"
            )
    return error
