"""A sender whose clock is wrong: its records are taken, and age by the broker's clock alone."""

import time

from confluent_kafka import Producer

from schemas.topics import Topics
from tests.assembling import create
from tests.run import ANSWER_S, read_topic

DAY_S = 24 * 3600


def test_records_age_by_the_broker_s_clock(broker, run_id, tmp_path):
    run = create(broker.bootstrap_servers, run_id, tmp_path)
    topics = Topics(run_id)
    now_s = time.time()
    failures = []
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for topic in (topics.rows, topics.status, topics.control, topics.events):
        for days in (-30, 30):
            producer.produce(
                topic,
                b"x",
                b"k",
                0,
                timestamp=int((now_s + days * DAY_S) * 1000),
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
    assert producer.flush(ANSWER_S) == 0
    assert failures == []
    for topic in (topics.rows, topics.status, topics.control, topics.events):
        found = [m.timestamp()[1] / 1000 for m in read_topic(run.config, topic) if m.key() == b"k"]
        assert len(found) == 2
        assert all(abs(at_s - now_s) < ANSWER_S for at_s in found)
