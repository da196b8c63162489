"""The rule by which a complete group may enter the `groups` topic, the durable replay buffer.

Pure. Version v is the number of optimizer steps done; step v trains target v. A group more than
`lead` steps ahead of the policy waits, one too old for its target is never trained.
"""

from dataclasses import dataclass
from enum import StrEnum

from schemas.records import Purpose

FIRST_DELAY_S = 0.010
DELAY_FACTOR = 1.5
MAX_DELAY_S = 0.5


class Answer(StrEnum):
    ACCEPTED = "accepted"
    FULL = "full"
    STALE = "stale"


@dataclass
class ReplayBuffer:
    """`highest_version`: the highest policy version ever announced; -1 before the first."""

    lead: int
    max_trajectory_age_steps: int
    highest_version: int = -1

    def announce(self, version: int) -> None:
        """Never falls, not even when the trainer goes back to a checkpoint."""
        self.highest_version = max(self.highest_version, version)

    def offer(self, target_step: int, generation_version: int, purpose: Purpose) -> Answer:
        """STALE holds for ever; FULL until a newer policy is announced."""
        if purpose is Purpose.VALIDATION:
            return Answer.ACCEPTED
        if generation_version < target_step - self.max_trajectory_age_steps:
            return Answer.STALE
        if target_step > self.highest_version + self.lead:
            return Answer.FULL
        return Answer.ACCEPTED


def next_delay_s(delay_s: float) -> float:
    """The wait after one of `delay_s`; FIRST_DELAY_S starts the series."""
    return min(delay_s * DELAY_FACTOR, MAX_DELAY_S)
