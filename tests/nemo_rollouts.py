"""Rollout records in NeMo Gym's shape: small ones written here, and real ones where they are found.

Real files lie outside the repository, beside it or where GROUPSTREAM_REAL_ROLLOUTS says. Of the
records written here the five of a group come in the order in which real ones did: 1, 3, 4, 0, 2.
"""

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

BESIDE = Path(__file__).parents[2] / "shared" / "data"
REAL_FILES = sorted(Path(os.environ.get("GROUPSTREAM_REAL_ROLLOUTS", BESIDE)).glob("*.jsonl"))
ORDER = (1, 3, 4, 0, 2)
VOCABULARY = 150_000

Record = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One file of records, in its order."""

    name: str
    records: list[Record]

    @property
    def has_token_ids(self) -> bool:
        return any(model_calls(record) for record in self.records)

    @property
    def has_components(self) -> bool:
        return any(record.get("reward_components") for record in self.records)


def recorded() -> list[Recorded]:
    """The ones written here, then every real file."""
    real = [
        Recorded(path.stem, [orjson.loads(line) for line in path.read_bytes().splitlines()])
        for path in REAL_FILES
    ]
    return [*written(), *real]


def written() -> list[Recorded]:
    return [
        Recorded("written_coding", [coding(index) for index in ORDER]),
        Recorded("written_agent", [agent(index) for index in ORDER]),
        Recorded("written_card_game", [card_game(index) for index in range(5)]),
        Recorded("written_coding_agent", [coding_agent(index) for index in range(5)]),
        Recorded("written_components", [components(index) for index in range(5)]),
    ]


def model_calls(record: Record) -> list[Record]:
    """The output items that carry what was sampled."""
    return [item for item in record["response"]["output"] if item.get("generation_token_ids")]


def output_types(record: Record) -> list[str]:
    return [item["type"] for item in record["response"]["output"]]


def coding(index: int) -> Record:
    """One model call, thought and answer; every rollout fails its tests."""
    call = sampled(message("cannot solve"), prompt(7, 9), 13 + 2 * index, seed=index)
    return record_of(index, [reasoning(), call], reward=0.0, subtask_score=11.0)


def agent(index: int) -> Record:
    """Two model calls with a tool's answer between; two rollouts of five are right."""
    first = sampled(function_call(), prompt(8, 11), 4 + index, seed=100 + index)
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    second = sampled(message("done"), seen + prompt(9 + index, 6), 3, seed=200 + index)
    output = [reasoning(), first, tool_answer(), second]
    return record_of(index, output, reward=float(index in (1, 2)))


def card_game(index: int) -> Record:
    """Messages only, without token ids: its model server did not return them."""
    said = [message("hit") for _ in range(1 + index % 3)]
    return record_of(index, said, reward=-1.0 if index else 1.0, terminated=True, truncated=False)


def coding_agent(index: int) -> Record:
    """Calls of tools without token ids, and a flag that does not ask for masking."""
    turn = [message("look"), function_call(), tool_answer()]
    output = turn * (1 + index) + [message("patched")]
    return record_of(
        index, output, reward=float(index != 2), mask_sample=False, instance_config={"id": "repo-1"}
    )


def components(index: int) -> Record:
    """A reward of three parts, without token ids."""
    parts = {"correctness": 1.0, "schema_valid": 0.5, "format": index / 8}
    output = [reasoning(), function_call(), tool_answer(), message("it rains")]
    return record_of(index, output, reward=sum(parts.values()), reward_components=parts)


def record_of(index: int, output: list[Record], *, reward: float, **more: Any) -> Record:
    usage = {"input_tokens": 90 + index, "output_tokens": 8, "total_tokens": 98 + index}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "the task"}]},
        "response": {"output": output, "usage": usage, "incomplete_details": None},
        "reward": reward,
        "agent_ref": {"name": "simple_agent"},
        "_ng_task_index": 0,
        "_ng_rollout_index": index,
    } | more


def as_group(records: Iterable[Record]) -> list[Record]:
    """The same with token ids in their last item, as rollouts 0, 1, 2, ... of one task."""
    changed = []
    for index, record in enumerate(records):
        *before, last = record["response"]["output"]
        output = [*before, sampled(last, prompt(5, 12), 5 + index, seed=300 + index)]
        response = record["response"] | {"output": output}
        changed.append(record | {"response": response, "_ng_rollout_index": index})
    return changed


def sampled(item: Record, prompt_ids: list[int], tokens: int, *, seed: int) -> Record:
    """`item` as a model call; its log-probabilities are float64, most of them no float32."""
    numbers = random.Random(seed)
    return item | {
        "prompt_token_ids": prompt_ids,
        "generation_token_ids": [numbers.randrange(VOCABULARY) for _ in range(tokens)],
        "generation_log_probs": [0.0, *(-numbers.expovariate(1) for _ in range(tokens - 1))],
    }


def prompt(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(tokens)]


def reasoning() -> Record:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "let me think"}]}


def message(text: str) -> Record:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, "status": "completed"}


def function_call() -> Record:
    return {"type": "function_call", "name": "run", "arguments": "{}", "call_id": "call-1"}


def tool_answer() -> Record:
    return {"type": "function_call_output", "call_id": "call-1", "output": "ok"}
