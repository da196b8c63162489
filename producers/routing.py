"""Where a prompt group goes: agent to shard, fixed; then whole groups round robin over replicas.

Pure. The cursors belong to the ledger, so that a restart goes on where the last commit was.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.topics import PARTITIONS_PER_REPLICA


@dataclass(frozen=True)
class Route:
    """`partition` of `prompts.<shard>` lies in the replica's block of PARTITIONS_PER_REPLICA."""

    shard: str
    replica: int
    partition: int


class Router:
    """`shard_of_agent` and `replicas` (by shard) never change during a run."""

    def __init__(self, shard_of_agent: Mapping[str, str], replicas: Mapping[str, int]) -> None:
        self._shard_of_agent = dict(shard_of_agent)
        self._replicas = dict(replicas)

    def route(
        self, agent: str, cursors: Mapping[str, int], avoid: int | None = None
    ) -> tuple[Route, int]:
        """The group's route and the next cursor of its shard.

        `avoid` is the replica of a failed attempt: another is taken where there is one. The
        partitions of a replica's block take turns, once round every replica.
        """
        shard = self._shard_of_agent[agent]
        replicas = self._replicas[shard]
        cursor = cursors.get(shard, 0)
        if replicas > 1 and cursor % replicas == avoid:
            cursor += 1
        replica = cursor % replicas
        place = cursor // replicas % PARTITIONS_PER_REPLICA
        return Route(shard, replica, replica * PARTITIONS_PER_REPLICA + place), cursor + 1
