"""Which prompt a shard starts next.

        prompts partition 0:  [seq 4] [5] [6]       each is a queue in offset order; only a head
        prompts partition 1:  [seq 9] [10]          may start, and only when its policy is loaded
                                  │
                 the head of the oldest target, when a slot is free

Pure. A prompt leaves its queue when it is taken, and the caller commits its offset before it
starts it. A prompt that must run alone holds every later start until the replica is idle.
"""

from collections import deque
from dataclasses import dataclass

from schemas.records import PromptGroup


@dataclass(frozen=True)
class Prompt:
    """A prompt group where it lies on its topic; `epoch` tells apart two assignments of the
    partition, and what was read before a seek from what was read after it."""

    partition: int
    offset: int
    epoch: int
    group: PromptGroup


class StartOrder:
    """The prompts that were read and not started."""

    def __init__(self, max_concurrent_groups: int) -> None:
        self._max_concurrent = max_concurrent_groups
        self._queues: dict[int, deque[Prompt]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, prompt: Prompt) -> None:
        self._queues.setdefault(prompt.partition, deque()).append(prompt)

    def drop(self, partition: int) -> None:
        """The partition went to another replica, or is read again from an earlier offset."""
        self._queues.pop(partition, None)

    def take(self, *, version: int, running: int, runs_alone: bool) -> Prompt | None:
        """The prompt to start now, if any.

        `version` is the loaded policy version, `running` the number of attempts that run, and
        `runs_alone` whether the one that runs must have no company.
        """
        if runs_alone or running >= self._max_concurrent:
            return None
        prompt = self.next_ready(version)
        if prompt is None or (prompt.group.alone and running > 0):
            return None
        return self._queues[prompt.partition].popleft()

    def next_ready(self, version: int) -> Prompt | None:
        """The head of the oldest target among those whose policy is loaded; `alone` ones first,
        so that the replica drains for them."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        ready = [head for head in heads if head.group.min_version <= version]
        return min(
            ready,
            key=lambda p: (not p.group.alone, p.group.target_step, p.group.task_index),
            default=None,
        )

    def awaited_version(self) -> int | None:
        """The lowest policy version that a head waits for."""
        return min(
            (queue[0].group.min_version for queue in self._queues.values() if queue), default=None
        )
