"""The commit rule of prompts, with a consumer whose commits fail as they are told to."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from producers import prompt_source
from producers.prompt_source import READ_AHEAD, Committed, PromptSource
from schemas.codec import encode
from schemas.config import KafkaConfig
from schemas.errors import Fenced, OffsetsLost, RecordUnreadable
from schemas.topics import Topics
from tests.prompts import make_group
from tests.rows import make_manifest

MANIFEST = make_manifest()
KAFKA = KafkaConfig(bootstrap_servers="nowhere:1")
TIMED_OUT = KafkaException(KafkaError(KafkaError.REQUEST_TIMED_OUT))


class OnePartition:
    """A consumer of a topic with one partition; `fails` are the outcomes of the next commits:
    ("lost", error) took effect, ("refused", error) did not, None succeeds."""

    def __init__(self, prompts=3, committed=None, low=0):
        self.payloads = [encode(make_group(MANIFEST, i, seq=100 + i)) for i in range(prompts)]
        self.stored = committed
        self.low = low
        self.fails = []
        self.foreign = None
        self.paused = False
        self.position = None
        self.seeks = []
        self.ended = None
        self.callbacks = None
        self.closed = False

    def __call__(self, settings):
        self.settings = settings
        return self

    def subscribe(self, topics, **callbacks):
        self.callbacks = callbacks

    def poll(self, _timeout):
        if self.position is None:
            self.callbacks["on_assign"](self, [TopicPartition("t", 0)])
        if self.ended is not None:
            return self._message(None, self.ended)
        if self.paused or self.position >= len(self.payloads):
            return None
        self.position += 1
        return self._message(self.payloads[self.position - 1], None)

    def commit(self, *, offsets, asynchronous):
        assert not asynchronous
        failure = self.fails.pop(0) if self.fails else None
        if failure is None or failure[0] == "lost":
            self.stored = (offsets[0].offset, offsets[0].metadata)
        if failure is not None:
            if self.foreign is not None:
                self.stored = self.foreign
            raise failure[1]
        return offsets

    def committed(self, partitions, timeout):
        offset, metadata = self.stored or (OFFSET_INVALID, None)
        found = TopicPartition("t", 0, offset)
        return [
            SimpleNamespace(partition=0, offset=found.offset, metadata=metadata, error=None)
            for _ in partitions
        ]

    def get_watermark_offsets(self, _partition, timeout):
        return self.low, len(self.payloads)

    def incremental_assign(self, partitions):
        self.position = partitions[0].offset

    def incremental_unassign(self, partitions):
        pass

    def seek(self, partition):
        self.seeks.append(partition.offset)
        self.position = partition.offset

    def pause(self, _partitions):
        self.paused = True

    def resume(self, _partitions):
        self.paused = False

    def close(self):
        self.closed = True

    def _message(self, payload, error):
        return SimpleNamespace(
            error=lambda: error,
            partition=lambda: 0,
            offset=lambda at=self.position - 1: at,
            value=lambda: payload,
        )


class Reader:
    """What the shard keeps of a source."""

    def __init__(self):
        self.prompts = []
        self.arrived = asyncio.Event()
        self.drops = 0
        self.seqs = []

    def drop(self, _partition):
        self.prompts.clear()
        self.drops += 1

    def add(self, prompt):
        self.prompts.append(prompt)
        self.arrived.set()

    async def until(self, count):
        async with asyncio.timeout(5):
            while len(self.prompts) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return self.prompts


@pytest.fixture
def opened(monkeypatch):
    """opened(consumer) -> async context of (source, reader)"""

    @contextlib.asynccontextmanager
    async def open_source(consumer):
        monkeypatch.setattr(prompt_source, "Consumer", consumer)
        reader = Reader()
        source = PromptSource(
            KAFKA,
            Topics("test-run"),
            "gym",
            1,
            on_prompt=reader.add,
            on_drop=reader.drop,
            on_committed_seq=lambda partition, seq: reader.seqs.append((partition, seq)),
        )
        try:
            yield source, reader
        finally:
            await source.close(5)
            assert consumer.closed

    return open_source


def play(opened, consumer, story):
    async def main():
        async with opened(consumer) as (source, reader):
            return await asyncio.wait_for(story(source, reader), 10)

    return asyncio.run(main())


def test_a_commit_covers_the_prompt_and_carries_its_sequence(opened):
    consumer = OnePartition()

    async def story(source, reader):
        prompts = await reader.until(3)
        assert await source.commit(prompts[0]) is Committed.YES
        assert consumer.stored[0] == 1
        assert consumer.stored[1].startswith("100 ")
        assert reader.seqs == [(0, 100)]
        assert await source.commit(prompts[1]) is Committed.YES
        assert consumer.stored[0] == 2

    play(opened, consumer, story)
    assert consumer.settings["group.instance.id"] == "gym-1"
    assert consumer.settings["enable.auto.commit"] is False


def test_a_commit_that_did_not_take_effect_is_tried_again_from_the_topic(opened):
    consumer = OnePartition()
    consumer.fails = [("refused", TIMED_OUT)]

    async def story(source, reader):
        first = (await reader.until(3))[0]
        assert await source.commit(first) is Committed.NO
        again = await reader.until(3)
        assert (reader.drops, consumer.seeks) == (1, [0])
        assert [prompt.offset for prompt in again] == [0, 1, 2]
        assert again[0].epoch != first.epoch
        assert reader.seqs == []
        assert await source.commit(again[0]) is Committed.YES

    play(opened, consumer, story)


def test_a_commit_that_took_effect_without_an_answer_never_starts(opened):
    consumer = OnePartition()
    consumer.fails = [("lost", TIMED_OUT)]

    async def story(source, reader):
        prompts = await reader.until(3)
        assert await source.commit(prompts[0]) is Committed.UNKNOWN
        assert (reader.drops, reader.seqs) == (0, [(0, 100)])
        assert await source.commit(prompts[1]) is Committed.YES

    play(opened, consumer, story)


def test_what_another_member_committed_is_its_own(opened):
    consumer = OnePartition()
    consumer.fails = [("refused", KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID)))]
    consumer.foreign = (1, "100 anotherprocess")

    async def story(source, reader):
        prompts = await reader.until(3)
        assert await source.commit(prompts[0]) is Committed.NO
        assert (reader.drops, reader.seqs) == (0, [])

    play(opened, consumer, story)


def test_a_prompt_of_a_revoked_partition_is_not_committed(opened):
    consumer = OnePartition()

    async def story(source, reader):
        prompt = (await reader.until(3))[0]
        consumer.callbacks["on_revoke"](consumer, [TopicPartition("t", 0)])
        assert await source.commit(prompt) is Committed.NO
        assert consumer.stored is None
        assert reader.drops == 1
        assert source.partitions == []

    play(opened, consumer, story)


@pytest.mark.parametrize("code", [KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL])
def test_a_fenced_member_ends(opened, code):
    consumer = OnePartition()
    words = "Static consumer fenced by other consumer"
    consumer.fails = [("refused", KafkaException(KafkaError(code, words)))]

    async def story(source, reader):
        prompts = await reader.until(3)
        with pytest.raises(Fenced, match="a newer process is gym shard gym/1"):
            await source.commit(prompts[0])
        with pytest.raises(Fenced):
            await source.failed

    play(opened, consumer, story)


def test_a_restart_begins_at_the_commit_and_knows_its_sequence(opened):
    async def story(source, reader):
        prompts = await reader.until(1)
        assert [prompt.offset for prompt in prompts] == [2]
        assert reader.seqs == [(0, 101)]

    play(opened, OnePartition(committed=(2, "101 before\0")), story)


def test_without_a_commit_every_prompt_must_still_be_there(opened):
    async def story(source, reader):
        with pytest.raises(OffsetsLost, match="no commit for partition 0"):
            await source.failed

    play(opened, OnePartition(low=1), story)


@pytest.mark.parametrize(
    ("code", "error"),
    [(KafkaError._AUTO_OFFSET_RESET, OffsetsLost), (KafkaError._FATAL, KafkaException)],
)
def test_what_ends_the_consumer_surfaces(opened, code, error):
    consumer = OnePartition()
    consumer.ended = KafkaError(code, "gone")

    async def story(source, reader):
        with pytest.raises(error):
            await source.failed

    play(opened, consumer, story)


def test_an_unreadable_prompt_is_named(opened):
    consumer = OnePartition()
    consumer.payloads[1] = b"garbage"

    async def story(source, reader):
        with pytest.raises(RecordUnreadable, match=r"test-run\.prompts\.gym partition 0 offset 1"):
            await source.failed

    play(opened, consumer, story)


def test_reading_ahead_is_bounded(opened):
    consumer = OnePartition(prompts=READ_AHEAD + 10)

    async def story(source, reader):
        prompts = list(await reader.until(READ_AHEAD))
        await asyncio.sleep(0.1)
        assert len(reader.prompts) == READ_AHEAD
        for prompt in prompts[: READ_AHEAD // 2]:
            await source.commit(prompt)
        await reader.until(READ_AHEAD + 10)

    play(opened, consumer, story)
