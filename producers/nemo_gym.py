"""A NeMo Gym result record as a RolloutResult: token ids as they were sampled, never re-tokenised.

Pure. Of the items in `response.output`, the last one of each model call carries the whole prompt of
that call (`prompt_token_ids`), what was sampled (`generation_token_ids`) and its log-probabilities
(`generation_log_probs`). A call's prompt begins with everything that the calls before it saw and
sampled; what it adds to that (tool outputs, a user's turn) is context and not trained.

    call 1:  prompt ──────── sampled ═══
    call 2:  prompt ──────── ─────────── tool ── sampled ═════
    trace:   ──────────────── ═══════════ ────── ════════════     spans: the two ═ runs
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from producers.gyms.protocol import RolloutResult
from producers.row import is_flagged
from schemas.errors import RowRejected
from schemas.records import SampledSpan, Trace
from schemas.vectors import logprob_bytes, token_bytes

COMPLETE = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def rollout_result(
    record: Mapping[str, Any], rollout_id: str, *, version_start: int, version_end: int
) -> RolloutResult:
    """One trace that holds every model call of the rollout, in order.

    The versions are those of the policy when the rollout began and ended. A failed or flagged
    result without token ids is a masked row without traces. Raises RowRejected, with
    reason `no_generation_data` where no item carries token ids, `not_contiguous` where a later
    prompt does not begin with the earlier tokens, `generation_logprobs` for a NaN, infinite or
    null log-probability or a wrong number of them, `token_ids`, `reward`, `reward_components` or
    `malformed_result` where a field is not what its name says.
    """
    where = f"rollout {rollout_id}"
    output = _output(record, where)
    calls = [item for item in output if item.get("generation_token_ids")]
    fields: dict[str, Any] = {
        "reward": _number(record.get("reward"), "reward", where),
        "reward_components": _components(record, where),
        "failure_class": _text_or_none(record, "_ng_failure_class", where),
        "version_start": version_start,
        "full_result": dict(record),
    }
    if not calls:
        if _has_failed(record) or is_flagged(record):
            return RolloutResult(traces=[], masked=True, turn_count=0, **fields)
        raise _no_generation_data(record, output, where)
    trace = _trace(calls, rollout_id, (version_start, version_end), where)
    return RolloutResult(
        traces=[trace],
        masked=_has_failed(record),
        truncated=_is_truncated(record),
        turn_count=len(calls),
        **fields,
    )


def _output(record: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    response = record.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise RowRejected(
            "malformed_result",
            f"{where}: response.output is not a list of items; the result has the keys "
            f"{sorted(record)}",
        )
    return output


def _trace(
    calls: Sequence[Mapping[str, Any]], rollout_id: str, versions: tuple[int, int], where: str
) -> Trace:
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[SampledSpan] = []
    for number, item in enumerate(calls):
        here = f"{where}: model call {number + 1} of {len(calls)} ({item.get('type')})"
        prompt, sampled, sampled_logprobs = _call(item, here)
        if prompt[: len(token_ids)] != token_ids:
            raise _not_contiguous(token_ids, prompt, here)
        added = len(prompt) - len(token_ids)
        token_ids = prompt + sampled
        logprobs += [0.0] * added + sampled_logprobs
        spans.append(
            SampledSpan(
                model_call_id=f"{rollout_id}:{number}",
                start=len(prompt),
                end=len(token_ids),
                version_start=versions[0],
                version_end=versions[1],
            )
        )
    return Trace(
        trace_id=f"{rollout_id}:{len(calls) - 1}",
        model_call_ids=[span.model_call_id for span in spans],
        token_ids=token_bytes(token_ids),
        generation_logprobs=logprob_bytes(logprobs),
        sampled_spans=spans,
    )


def _call(item: Mapping[str, Any], here: str) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, sampled ids and their log-probabilities of one model call."""
    missing = [key for key in COMPLETE if not item.get(key)]
    if missing:
        raise RowRejected("token_ids", f"{here}: generation_token_ids, but no {missing}")
    prompt = _ids(item, "prompt_token_ids", here)
    sampled = _ids(item, "generation_token_ids", here)
    values = item["generation_log_probs"]
    if not isinstance(values, list) or len(values) != len(sampled):
        found = len(values) if isinstance(values, list) else type(values).__name__
        raise RowRejected(
            "generation_logprobs",
            f"{here}: {found} generation_log_probs for {len(sampled)} generation_token_ids",
        )
    for at, value in enumerate(values):
        if not _is_number(value) or not math.isfinite(value):
            raise RowRejected(
                "generation_logprobs", f"{here}: generation_log_probs[{at}] is {value!r}"
            )
    return prompt, sampled, values


def _ids(item: Mapping[str, Any], key: str, here: str) -> list[int]:
    ids = item[key]
    if not isinstance(ids, list):
        raise RowRejected("token_ids", f"{here}: {key} is {type(ids).__name__}, not a list")
    for at, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < 2**31:
            raise RowRejected("token_ids", f"{here}: {key}[{at}] is {value!r}, no token id")
    return ids


def _not_contiguous(seen: list[int], prompt: list[int], here: str) -> RowRejected:
    differs = next(
        (at for at, (a, b) in enumerate(zip(seen, prompt, strict=False)) if a != b),
        min(len(seen), len(prompt)),
    )
    return RowRejected(
        "not_contiguous",
        f"{here}: its prompt of {len(prompt)} tokens does not begin with the {len(seen)} tokens of "
        f"the calls before, they differ at token {differs}: the agent changed its history, or text "
        "was tokenised again",
    )


def _no_generation_data(
    record: Mapping[str, Any], output: Sequence[Mapping[str, Any]], where: str
) -> RowRejected:
    types = [str(item.get("type")) for item in output]
    return RowRejected(
        "no_generation_data",
        f"{where}: no output item carries generation_token_ids, so there is nothing to train on. "
        f"Prompt: {_prompt_length(record, output)}; output items: {types}. Does the model server "
        "return token ids (return_token_id_information: true), and does the prompt fit the "
        "context?",
    )


def _prompt_length(record: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> str:
    """In tokens, as far as the record knows it."""
    for item in output:
        if isinstance(item.get("prompt_token_ids"), list):
            return f"{len(item['prompt_token_ids'])} tokens"
    response = record["response"]
    usage = response.get("usage")
    if isinstance(usage, Mapping) and _is_number(usage.get("input_tokens")):
        return f"{usage['input_tokens']} input tokens over all model calls"
    return "of unknown length"


def _components(record: Mapping[str, Any], where: str) -> dict[str, float]:
    components = record.get("reward_components")
    if components is None:
        return {}
    if not isinstance(components, Mapping):
        raise RowRejected("reward_components", f"{where}: reward_components is {components!r}")
    return {
        str(name): _number(value, "reward_components", f"{where}: component {name}")
        for name, value in components.items()
    }


def _number(value: Any, field: str, where: str) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise RowRejected(field, f"{where}: {field} is {value!r}, not a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text_or_none(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowRejected("malformed_result", f"{where}: {key} is {value!r}, not text")


def _has_failed(record: Mapping[str, Any]) -> bool:
    """The gym says so; a flag `mask_sample` beside tokens is for the row to weigh."""
    return record.get("_ng_failure_class") is not None


def _is_truncated(record: Mapping[str, Any]) -> bool:
    """The token budget ended the response."""
    details = record["response"].get("incomplete_details")
    return isinstance(details, Mapping) and details.get("reason") == "max_output_tokens"
