"""Directories of weights and checkpoints: their names, which exist, which go and how.

A name is a number and the writing trainer's token, so no name is ever used twice.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.config import Config
from schemas.control import ControlState

# a gym shard may still be loading a version when the next ones are announced
KEPT_VERSIONS = 4

_WEIGHTS = re.compile(r"v(\d+)-[0-9a-f]+")
_CHECKPOINT = re.compile(r"step_(\d+)-[0-9a-f]+")
_UNFINISHED = re.compile(r"\.(v|step_)\d+-[0-9a-f]+\.(partial|removed)\b.*")


@dataclass(frozen=True)
class Numbered:
    """A directory of weights (`number` is the version) or a checkpoint (the step)."""

    number: int
    path: Path


def weights_path(directory: Path, version: int, token: str) -> Path:
    return directory / f"v{version:06d}-{token}"


def checkpoint_path(directory: Path, step: int, token: str) -> Path:
    return directory / f"step_{step:06d}-{token}"


def weights_in(directory: Path) -> list[Numbered]:
    """Complete directories of weights, oldest version first."""
    return _matching(directory, _WEIGHTS)


def checkpoints_in(directory: Path) -> list[Numbered]:
    """Complete checkpoints, recorded or not, oldest step first."""
    return _matching(directory, _CHECKPOINT)


def unfinished_in(directory: Path) -> list[Path]:
    """What a killed trainer left half written or half removed."""
    return [path for path in _entries(directory) if _UNFINISHED.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Nobody ever sees the half of it. A path that is gone is fine."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".{path.name}.removed")
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
    shutil.rmtree(doomed, ignore_errors=True)  # what stays is unfinished_in() at the next start


def superseded_weights(found: Sequence[Numbered], version: int) -> list[Path]:
    """Weights that are KEPT_VERSIONS or more behind `version`, the newest announced."""
    return [each.path for each in found if each.number <= version - KEPT_VERSIONS]


def superseded_checkpoints(found: Sequence[Numbered], recorded: int, keep: int) -> list[Path]:
    """All but the newest `keep` up to step `recorded`; what is above it is not ours to judge."""
    up_to = sorted((each for each in found if each.number <= recorded), key=lambda e: e.number)
    return [each.path for each in up_to[: max(0, len(up_to) - keep)]]


@dataclass(frozen=True)
class Leftovers:
    """What stood in the directories before this trainer fenced its predecessors.

    Listed before that, so that nothing of a successor's is ever among it.
    """

    unfinished: tuple[Path, ...]
    weights: tuple[Numbered, ...]
    checkpoints: tuple[Numbered, ...]

    @classmethod
    def listed(cls, config: Config) -> "Leftovers":
        weights, checkpoints = config.weights_directory, config.checkpoint_directory
        return cls(
            unfinished=(*unfinished_in(weights), *unfinished_in(checkpoints)),
            weights=tuple(weights_in(weights)),
            checkpoints=tuple(checkpoints_in(checkpoints)),
        )

    def unrecorded(self, state: ControlState) -> list[Path]:
        """What `control` does not know: a trainer died before it could say so."""
        checkpoint, policy = state.checkpoint, state.policy
        newest_step = checkpoint.step if checkpoint else -1
        saved = Path(checkpoint.directory) if checkpoint else None
        announced = Path(policy.weights_dir) if policy else None
        return [
            *self.unfinished,
            *(c.path for c in self.checkpoints if c.number >= newest_step and c.path != saved),
            *(
                w.path
                for w in self.weights
                if w.number >= state.highest_version and w.path != announced
            ),
        ]


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Numbered]:
    matches = [(pattern.fullmatch(path.name), path) for path in _entries(directory)]
    found = [Numbered(int(match[1]), path) for match, path in matches if match]
    return sorted(found, key=lambda each: (each.number, each.path.name))


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
