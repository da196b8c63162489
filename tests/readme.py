"""README.md as a program reads it: its blocks of code, and the commands that it names."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_COMMAND = re.compile(r"(?:\.venv/bin/)?(make|python|groupstream(?:-[a-z-]+)?)(?: .*)?")


@dataclass(frozen=True)
class Command:
    """A line that a reader may type: `arguments` without its comment, `name` without its path."""

    line: str
    name: str
    arguments: list[str]

    @property
    def settings(self) -> dict[str, str]:
        """NAME=value among the arguments, dotted keys included."""
        pairs = (argument.split("=", 1) for argument in self.arguments if "=" in argument)
        return {name: value for name, value in pairs if not name.startswith("-")}

    @property
    def options(self) -> list[str]:
        return [argument.split("=")[0] for argument in self.arguments if argument[0] == "-"]

    def value_of(self, option: str) -> str | None:
        at = self.arguments.index(option) if option in self.arguments else -2
        return self.arguments[at + 1] if 0 <= at < len(self.arguments) - 1 else None


def blocks(language: str) -> list[str]:
    """The fenced blocks that are marked so, in order; "" for those without a mark."""
    return [code for mark, code in _FENCE.findall(TEXT) if mark == language]


def inline_code() -> list[str]:
    return _INLINE.findall(_FENCE.sub("", TEXT))


def links() -> list[str]:
    """Targets inside the repository."""
    return _LINK.findall(_FENCE.sub("", TEXT))


def commands() -> list[Command]:
    """Every line of an unmarked block, and every piece of inline code, that begins with one."""
    lines = [
        line for mark in ("", "sh", "bash") for code in blocks(mark) for line in code.split("\n")
    ]
    found = []
    for line in [*lines, *inline_code()]:
        match = _COMMAND.fullmatch(line.strip())
        if match:
            _, *arguments = shlex.split(line, comments=True)
            found.append(Command(line.strip(), match[1], arguments))
    return found
