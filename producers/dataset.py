"""Prompts from a JSONL file in NeMo Gym's row format, in an order that a restart repeats.

A row must have `responses_create_params` (an object) and `agent_ref.name`. One line is one
prompt, repeated G times; G lines with the same `_ng_task_index` are one prompt too, with a row of
its own for each rollout, in the order of `_ng_rollout_index`. The whole file is checked when it
is opened; afterwards only byte offsets are kept, and rows are read when they are dispatched.
"""

import random
from array import array
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast

import orjson

from producers.dataset_scan import AGENT_REF, Scan
from schemas.errors import DatasetError

EPOCHS_KEPT = 3  # a retry may belong to an epoch that ended


class Dataset:
    """One thread. A prompt is named by (epoch, position in the epoch's order)."""

    def __init__(self, path: Path, scan: Scan, *, seed: int, shuffle: bool) -> None:
        self._path = path
        self._offsets = scan.offsets
        self._bounds = scan.bounds
        self._seed = seed
        self._shuffle = shuffle
        self._file = path.open("rb")
        self._agents = scan.agent_names
        self._agent_of = scan.agents
        self._order = lru_cache(EPOCHS_KEPT)(self._order_of)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        group_size: int,
        shard_of_agent: Mapping[str, str],
        seed: int,
        shuffle: bool,
        max_prompt_bytes: int,
    ) -> Self:
        """Raises DatasetError, once, with every wrong line of the file and the hosted agents."""
        path = Path(path)
        scan = Scan(group_size, shard_of_agent, max_prompt_bytes)
        try:
            with path.open("rb") as file:
                scan.read(file)
        except OSError as error:
            raise DatasetError(f"data.train_jsonl_fpath {path}: {error.strerror}") from error
        scan.finish(str(path))
        return cls(path, scan, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._bounds) - 1

    def agent_of(self, epoch: int, position: int) -> str:
        return self._agents[self._agent_of[self._order(epoch)[position]]]

    def rows_of(self, epoch: int, position: int) -> list[dict[str, Any]]:
        """The prompt's one row, or its G rows in rollout order.

        Raises DatasetError where the file is no longer what was checked.
        """
        prompt = self._order(epoch)[position]
        rows = []
        for offset in self._offsets[self._bounds[prompt] : self._bounds[prompt + 1]]:
            self._file.seek(offset)
            rows.append(self._row(self._file.readline(), offset))
        return rows

    def close(self) -> None:
        self._file.close()

    def _row(self, line: bytes, offset: int) -> dict[str, Any]:
        try:
            row = orjson.loads(line)
            _ = row[AGENT_REF]["name"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise DatasetError(
                f"{self._path} changed while it was in use: no row starts at byte {offset} any "
                f"more ({error}); restore the file and start the dispatcher again"
            ) from error
        return cast(dict[str, Any], row)

    def _order_of(self, epoch: int) -> "array[int]":
        """Prompt numbers in the order of `epoch`: only random() is promised not to change between
        versions of Python, so prompts are sorted by it rather than shuffled."""
        prompts = range(len(self))
        if not self._shuffle:
            return array("q", prompts)
        source = random.Random(f"{self._seed}/{epoch}")
        keys = [source.random() for _ in prompts]
        return array("q", sorted(prompts, key=keys.__getitem__))
