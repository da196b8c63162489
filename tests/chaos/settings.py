"""What a chaos run is asked for: the words of its command line."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from tests.chaos.schedule import MODES

PROTOCOLS = ("classic", "consumer")
CHOICES: dict[str, Sequence[str]] = {"mode": tuple(MODES), "protocol": PROTOCOLS}
PROFILES = {
    "short": "seconds=25",
    "minute": "seconds=60",
    "long": "prompts=2000 seconds=300 kill_every=3 mode=kill broker_restarts=2",
}
GROUPS_PER_STEP = 8
QUICK_STEP_S = 0.05
ALWAYS_SAID = ("seed", "seconds", "mode")


class BadSetting(Exception):
    """An argument of the command line that means nothing."""


@dataclass(frozen=True)
class Settings:
    """`seconds`: of the schedule. `prompts` 0: the data ends when the schedule does.

    `kill_every`: seconds between two faults of roles, on average. `broker_restarts` None: as many
    as the mode has.
    """

    seed: int = 7
    seconds: int = 60
    mode: str = "mixed"
    protocol: str = "classic"
    prompts: int = 0
    kill_every: int = 3
    broker_restarts: int | None = None
    assemblers: int = 2
    shards: int = 2

    @classmethod
    def parsed(cls, arguments: Sequence[str]) -> Self:
        """Of `seed=7 seconds=60 ...`, or of a profile's name. Raises BadSetting."""
        found: dict[str, Any] = {}
        for argument in arguments:
            for word in PROFILES.get(argument, argument).split():
                found |= [_setting(cls, word)]
        return cls(**found)

    @property
    def steps(self) -> int:
        """How many the data is for; 0: it ends with the schedule."""
        return self.prompts // GROUPS_PER_STEP

    @property
    def step_s(self) -> float:
        """What a step takes at least: so long that the data lasts for most of the schedule."""
        return max(QUICK_STEP_S, 0.9 * self.seconds / self.steps) if self.steps else QUICK_STEP_S

    @property
    def replay(self) -> str:
        """The command that gives this schedule again."""
        words = [
            f"{field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name in ALWAYS_SAID
        ]
        return f'make chaos CHAOS="{" ".join(words)}"'


def _setting(settings: type[Settings], word: str) -> tuple[str, str | int]:
    name, _, value = word.partition("=")
    if name in CHOICES and value in CHOICES[name]:
        return name, value
    if name in {field.name for field in fields(settings)} - CHOICES.keys() and value.isdecimal():
        least = 0 if name in ("seed", "prompts", "broker_restarts") else 1
        if int(value) >= least:
            return name, int(value)
    numbers = [field.name for field in fields(settings) if field.name not in CHOICES]
    choices = "; ".join(f"{name}, one of {', '.join(known)}" for name, known in CHOICES.items())
    raise BadSetting(
        f"{word!r} is no setting; known are {', '.join(numbers)}, each a number; {choices}; "
        f"and the profiles {', '.join(PROFILES)}"
    )
