"""Whole groups go to the shard of their agent and take turns on its replicas."""

import pytest

from producers.routing import Route, Router
from schemas.topics import PARTITIONS_PER_REPLICA

G = 2


class Batch:
    """Routes groups one after the other, and keeps the rows of each replica."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.cursors: dict[str, int] = {}
        self.routes: list[Route] = []
        self.rows: dict[str, list[int]] = {}

    def add(self, agent: str, avoid: int | None = None) -> Route:
        route, cursor = self.router.route(agent, self.cursors, avoid)
        self.cursors[route.shard] = cursor
        first = len(self.routes) * G
        self.rows.setdefault(f"{route.shard}/{route.replica}", []).extend(range(first, first + G))
        self.routes.append(route)
        return route


def test_groups_go_to_the_shard_of_their_agent():
    batch = Batch(Router({"alpha": "left", "beta": "right"}, {"left": 1, "right": 1}))
    for agent in ("alpha", "beta", "alpha"):
        batch.add(agent)
    assert batch.rows == {"left/0": [0, 1, 4, 5], "right/0": [2, 3]}


def test_replicas_take_turns_by_whole_groups():
    batch = Batch(Router({"a": "busy", "b": "busy"}, {"busy": 2}))
    for agent in "abba":
        batch.add(agent)
    assert batch.rows == {"busy/0": [0, 1, 4, 5], "busy/1": [2, 3, 6, 7]}


def test_one_shard_takes_everything():
    batch = Batch(Router({"a": "gym", "b": "gym"}, {"gym": 1}))
    for agent in "abab":
        batch.add(agent)
    assert batch.rows == {"gym/0": list(range(8))}


def test_cursors_go_on_where_they_were():
    router = Router({"a": "busy"}, {"busy": 3})
    straight, resumed = Batch(router), Batch(router)
    for _ in range(7):
        straight.add("a")
    for _ in range(4):
        resumed.add("a")
    later = Batch(Router({"a": "busy"}, {"busy": 3}))
    later.cursors = dict(resumed.cursors)
    assert [later.add("a") for _ in range(3)] == straight.routes[4:]


def test_shards_have_cursors_of_their_own():
    batch = Batch(Router({"a": "one", "b": "two"}, {"one": 2, "two": 2}))
    assert [batch.add(agent).replica for agent in "ababba"] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_partitions_lie_in_the_block_of_their_replica_and_take_turns(replicas):
    batch = Batch(Router({"a": "gym"}, {"gym": replicas}))
    for _ in range(replicas * PARTITIONS_PER_REPLICA):
        route = batch.add("a")
        assert route.partition // PARTITIONS_PER_REPLICA == route.replica
    used = [route.partition for route in batch.routes]
    assert sorted(used) == list(range(replicas * PARTITIONS_PER_REPLICA))


def test_a_failed_attempt_goes_to_another_replica():
    batch = Batch(Router({"a": "gym"}, {"gym": 2}))
    for _ in range(5):
        assert batch.add("a", avoid=0).replica == 1
        assert batch.add("a", avoid=1).replica == 0


def test_a_single_replica_is_not_avoided():
    assert Batch(Router({"a": "gym"}, {"gym": 1})).add("a", avoid=0).replica == 0
