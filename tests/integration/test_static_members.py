"""A killed shard's successor in a KIP-848 group, which keeps the place of a static member."""

import asyncio
import subprocess
import sys
import time

import orjson
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from producers.prompt_source import PromptSource
from schemas.clients import consumer_config
from schemas.topics import PARTITIONS_PER_REPLICA, Topics
from tests.assembling import create

SESSION_S = 6
WAIT_S = 60.0
MEMBER = """
import sys, time
from confluent_kafka import Consumer
import orjson
consumer = Consumer(orjson.loads(sys.argv[1]))
consumer.subscribe([sys.argv[2]], on_assign=lambda c, p: print("assigned", flush=True))
while True:
    consumer.poll(0.1)
"""


def shorten_session(config, group):
    entry = ConfigEntry(
        "consumer.session.timeout.ms",
        str(SESSION_S * 1000),
        incremental_operation=AlterConfigOpType.SET,
    )
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": config.kafka.bootstrap_servers})
    admin.incremental_alter_configs([resource])[resource].result(WAIT_S)


async def assigned(source):
    ends_s = time.monotonic() + WAIT_S
    while len(source.partitions) < PARTITIONS_PER_REPLICA:
        assert not source.failed.done(), source.failed.exception()
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.1)


def test_it_waits_for_the_session_of_its_predecessor(broker, run_id, tmp_path):
    run = create(broker.bootstrap_servers, run_id, tmp_path, group_protocol="consumer")
    topics = Topics(run_id)
    (shard,) = run.config.all_shards
    group = topics.shard_group(shard)
    shorten_session(run.config, group)

    async def successor():
        source = PromptSource(
            run.config.kafka,
            topics,
            shard,
            0,
            on_prompt=lambda prompt: None,
            on_drop=lambda partition: None,
            on_committed_seq=lambda partition, seq: None,
        )
        try:
            await assigned(source)
        finally:
            await source.close(10.0)

    member = consumer_config(run.config.kafka, "first", group)
    member |= {"group.instance.id": f"{shard}-0"}
    arguments = [orjson.dumps(member).decode(), topics.prompts(shard)]
    with subprocess.Popen(
        [sys.executable, "-c", MEMBER, *arguments], stdout=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stdout.readline() == "assigned\n"
        finally:
            first.kill()
    killed_s = time.monotonic()
    asyncio.run(successor())
    assert time.monotonic() - killed_s > SESSION_S / 2
