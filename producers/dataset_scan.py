"""One pass over a dataset: where each prompt's rows are, and everything that is wrong with them."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from schemas.errors import DatasetError

AGENT_REF = "agent_ref"
PARAMS = "responses_create_params"
TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
LINES_SHOWN = 20
ADDED_BYTES = 256  # identity keys that the dispatcher adds to a row


@dataclass
class _Group:
    """The lines that share one supplied task index, by line number."""

    prompt: int
    lines: list[int]
    offsets: list[int]
    rollouts: list[Any]
    agents: list[str]
    size_bytes: int = 0


class _Wrong(Exception):
    """What is wrong with one line."""


class Scan:
    """Call read(), then finish(); the results are `offsets`, `bounds`, `agents`, `agent_names`.

    The rows of prompt i start at the bytes offsets[bounds[i]:bounds[i + 1]], and its agent is
    agent_names[agents[i]].
    """

    def __init__(
        self, group_size: int, shard_of_agent: Mapping[str, str], max_prompt_bytes: int
    ) -> None:
        self.offsets: array[int] = array("q")
        self.bounds: array[int] = array("q", [0])
        self.agents: array[int] = array("q")
        self.agent_names: list[str] = []
        self._agent_numbers: dict[str, int] = {}
        self._group_size = group_size
        self._hosted = shard_of_agent
        self._limit = max_prompt_bytes
        self._first_offsets: array[int] = array("q")
        self._groups: dict[int, _Group] = {}
        self._problems: list[tuple[int, str]] = []
        self._unknown: dict[str, list[int]] = {}

    def read(self, file: BinaryIO) -> None:
        offset = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    self._add(number, offset, line)
                except _Wrong as wrong:
                    self._problems.append((number, f"line {number}: {wrong}"))
            offset += len(line)

    def finish(self, path: str) -> None:
        """Raises DatasetError with all that was found."""
        by_prompt = {group.prompt: group for group in self._groups.values()}
        for shared in by_prompt.values():
            self._check_group(shared)
        if self._problems or self._unknown:
            raise DatasetError(self._report(path))
        if not self._first_offsets:
            raise DatasetError(f"{path} has no rows: give at least one prompt")
        for prompt, offset in enumerate(self._first_offsets):
            group = by_prompt.get(prompt)
            self.offsets.extend(group.offsets if group else [offset])
            self.bounds.append(len(self.offsets))

    def _add(self, number: int, offset: int, line: bytes) -> None:
        row = _object(line)
        agent = self._agent(number, row)
        supplied = row.get(TASK_INDEX)
        if supplied is None:
            self._check_size(len(line), 1)
            self._new_prompt(offset, agent)
            return
        if type(supplied) is not int or supplied < 0:
            raise _Wrong(f"{TASK_INDEX} is {supplied!r}, it must be an integer from 0")
        group = self._groups.get(supplied)
        if group is None:
            prompt = self._new_prompt(offset, agent)
            group = self._groups[supplied] = _Group(prompt, [], [], [], [])
        group.lines.append(number)
        group.offsets.append(offset)
        group.rollouts.append(row.get(ROLLOUT_INDEX))
        group.agents.append(agent)
        group.size_bytes += len(line)

    def _agent(self, number: int, row: dict[str, Any]) -> str:
        if not isinstance(row.get(PARAMS), dict):
            raise _Wrong(f"{PARAMS} is {_short(row.get(PARAMS))}, it must be an object")
        reference = row.get(AGENT_REF)
        name = reference.get("name") if isinstance(reference, dict) else None
        if not isinstance(name, str) or not name:
            raise _Wrong(
                f"{AGENT_REF} is {_short(reference)}, it must be an object with the agent's name, "
                'as in {"agent_ref": {"name": "..."}}'
            )
        if name not in self._hosted:
            self._unknown.setdefault(name, []).append(number)
        return name

    def _new_prompt(self, offset: int, agent: str) -> int:
        known = self._agent_numbers.setdefault(agent, len(self.agent_names))
        if known == len(self.agent_names):
            self.agent_names.append(agent)
        self.agents.append(known)
        self._first_offsets.append(offset)
        return len(self._first_offsets) - 1

    def _check_group(self, group: _Group) -> None:
        try:
            self._check_size(group.size_bytes, len(group.lines))
            if len(set(group.agents)) > 1:
                raise _Wrong(f"agents {sorted(set(group.agents))}: a prompt group has one agent")
            if len(group.lines) > 1:
                self._put_in_order(group)
        except _Wrong as wrong:
            lines = _numbers(group.lines)
            self._problems.append((group.lines[0], f"lines {lines}, one {TASK_INDEX}: {wrong}"))

    def _put_in_order(self, group: _Group) -> None:
        size = self._group_size
        if len(group.lines) != size:
            raise _Wrong(
                f"{len(group.lines)} rows, it must be 1 (repeated) or "
                f"grpo.num_generations_per_prompt = {size}"
            )
        if all(index is None for index in group.rollouts):
            return
        by_index = {
            index: offset
            for index, offset in zip(group.rollouts, group.offsets, strict=True)
            if type(index) is int and 0 <= index < size
        }
        if len(by_index) != size:
            raise _Wrong(f"{ROLLOUT_INDEX} {group.rollouts}, it must be each of 0..{size - 1} once")
        group.offsets = [by_index[index] for index in range(size)]

    def _check_size(self, size_bytes: int, rows: int) -> None:
        total = size_bytes + rows * ADDED_BYTES
        if total > self._limit:
            raise _Wrong(
                f"the prompt takes {total} bytes, kafka.max_row_bytes is {self._limit}: raise it"
            )

    def _report(self, path: str) -> str:
        found = [text for _, text in sorted(self._problems)]
        found += [
            f"agent {name!r} is not hosted by any shard: lines {_numbers(lines)}"
            for name, lines in sorted(self._unknown.items())
        ]
        shown = found[:LINES_SHOWN]
        if len(found) > LINES_SHOWN:
            shown.append(f"and {len(found) - LINES_SHOWN} more")
        hosted = ", ".join(f"{agent} (shard {shard})" for agent, shard in self._hosted.items())
        return "\n  ".join([f"{path}:", *shown, f"hosted agents: {hosted}"])


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _Wrong(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _Wrong(f"{_short(row)}, a row is a JSON object")
    return row


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _numbers(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:LINES_SHOWN]))
    return shown if len(lines) <= LINES_SHOWN else f"{shown} and {len(lines) - LINES_SHOWN} more"
