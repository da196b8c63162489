"""What was done to a run, when, and how often."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from schemas.status import now_ms
from tests.chaos.schedule import Action


@dataclass(frozen=True)
class Deed:
    """One fault that was carried out; `at_ms` is the true wall clock."""

    at_ms: int
    action: Action
    role: str
    for_s: float = 0.0

    @property
    def end_ms(self) -> int:
        return self.at_ms + int(self.for_s * 1000)


@dataclass
class Deeds:
    """Each is a line of `journal` as well, from the moment at which it is done."""

    journal: Path
    done: list[Deed] = field(default_factory=list)

    def note(self, action: Action, role: str, for_s: float = 0.0, shift_s: float = 0.0) -> None:
        deed = Deed(now_ms(), action, role, for_s)
        self.done.append(deed)
        line = {
            "at_ms": deed.at_ms,
            "action": action,
            "role": role,
            "for_s": round(for_s, 3),
            "shift_s": round(shift_s),
        }
        with self.journal.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    @property
    def counts(self) -> dict[str, int]:
        """Of each kind, those that never happened too."""
        found = Counter(deed.action for deed in self.done)
        return {action.value: found[action] for action in Action}
