import asyncio
from types import SimpleNamespace

import pytest

from producers import policy_follower
from producers.policy_follower import LoadOptions, PolicyFollower
from schemas.control import ControlState
from schemas.errors import ConfigError
from schemas.records import PolicyVersion

OPTIONS = LoadOptions(in_flight=False, recompute_kv_cache=True, deadline_s=5.0)


class Watch:
    """What ControlWatch shows to a follower."""

    def __init__(self):
        self.state = ControlState()
        self.changed = asyncio.Event()

    def announce(self, version, directory):
        record = PolicyVersion(version=version, weights_dir=str(directory), published_at_ms=1)
        self.state.apply("policy", record)
        self.changed.set()


class Engine:
    def __init__(self):
        self.loads = []

    async def load_weights(self, weights_dir, version, **options):
        await asyncio.sleep(0.01)
        self.loads.append((version, options))


def follow(story, engine):
    async def main():
        watch, loaded = Watch(), asyncio.Event()
        follower = PolicyFollower(watch, engine, OPTIONS, on_loaded=loaded.set)
        task = asyncio.create_task(follower.run())

        async def reached(version):
            async with asyncio.timeout(5):
                while follower.version != version:
                    if task.done():
                        task.result()
                    loaded.clear()
                    await asyncio.wait({task, asyncio.ensure_future(loaded.wait())}, timeout=0.1,
                                       return_when=asyncio.FIRST_COMPLETED)  # fmt: skip

        try:
            await story(SimpleNamespace(watch=watch, follower=follower, reached=reached))
        finally:
            task.cancel()

    asyncio.run(main())


def test_the_newest_version_is_loaded_with_the_configured_options(tmp_path):
    engine = Engine()

    async def story(run):
        assert run.follower.version == -1
        run.watch.announce(0, tmp_path)
        await run.reached(0)
        run.watch.announce(1, tmp_path)
        run.watch.announce(2, tmp_path)
        await run.reached(2)

    follow(story, engine)
    assert [version for version, _ in engine.loads] == [0, 2]
    assert engine.loads[0][1] == {
        "in_flight": False,
        "recompute_kv_cache": True,
        "deadline_s": 5.0,
    }


def test_the_version_never_falls(tmp_path):
    engine = Engine()

    async def story(run):
        run.watch.announce(3, tmp_path)
        await run.reached(3)
        run.watch.announce(2, tmp_path)
        await asyncio.sleep(0.05)
        assert run.follower.version == 3

    follow(story, engine)
    assert len(engine.loads) == 1


def test_deleted_weights_are_no_failure_where_a_newer_version_follows(tmp_path):
    async def story(run):
        run.watch.announce(0, tmp_path / "gone")
        await asyncio.sleep(0.05)
        run.watch.announce(1, tmp_path)
        await run.reached(1)

    follow(story, Engine())


def test_weights_that_are_nowhere_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_follower, "GONE_S", 0.05)

    async def story(run):
        run.watch.announce(0, tmp_path / "gone")
        await run.reached(0)

    with pytest.raises(ConfigError, match=r"policy version 0.*gone.*run\.directory"):
        follow(story, Engine())


def test_without_an_engine_announced_is_loaded():
    async def story(run):
        run.watch.announce(4, "nowhere")
        await run.reached(4)

    follow(story, None)
