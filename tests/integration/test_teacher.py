"""Teacher log-probabilities on a real broker: right ones, late ones, none."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from schemas.codec import encode
from schemas.errors import ConfigError
from schemas.records import AssembledGroup, EventKind
from schemas.vectors import logprobs, tokens
from tests.assembling import Run, assembler, wait_for
from tests.rows import make_row, make_rows, make_trace
from tests.run import announce
from tests.teacher_server import Reply, echoed, logprob_of, teacher_server

VOCABULARY = 300
VLLM_STARTS_S = 300.0  # a minute on a busy machine
LONGEST = 128  # policy.max_total_sequence_length, the teacher's whole context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        initializer_range=0.1,  # wide enough for probabilities that differ
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return directory


def taught_by(run: Run, **teachers: Any) -> Run:
    """The run under a configuration with these teachers."""
    values = run.config.model_dump()
    values["teachers"] = teachers
    values["env"]["agents"] |= {"products": {"gym": "module:Gym"}}
    values["policy"]["max_total_sequence_length"] = LONGEST
    return Run(type(run.config).model_validate(values), run.manifest, run.topics)


def answer_of(group: AssembledGroup) -> dict[int, list[float]]:
    """[tokens] by row; every row of these tests has one trace."""
    return {t.row_index: logprobs(t.logprobs).tolist() for t in group.teacher_logprobs}


def test_vllm_scores_a_group_as_hugging_face_does(new_run: Callable[..., Run], model: Path) -> None:
    run = taught_by(
        new_run(),
        models={"big": {"model_name": str(model), "vllm_cfg": {"precision": "float32"}}},
        default_teacher="big",
    )
    ids = [np.random.default_rng(row).integers(0, VOCABULARY, 120 + row) for row in range(4)]
    ids[3] = np.resize(ids[3], LONGEST)  # fills the context
    traces = [_trace_of(row, sequence) for row, sequence in enumerate(ids)]
    sent = [encode(make_row(run.manifest, 0, row, traces=[traces[row]])) for row in range(4)]
    run.send_rows([(0, payload) for payload in sent])
    with assembler(run) as running:
        wait_for("group", lambda: len(run.groups()) == 1, running, VLLM_STARTS_S)
        wait_for("metric", lambda: run.heartbeat("a").get("teacher_groups/big") == 1, running)
        assert run.heartbeat("a")["teacher_logprob_s/big"] > 0
    (group,) = run.groups()
    assert {(t.teacher, t.trace_id) for t in group.teacher_logprobs} == {
        ("big", trace.trace_id) for trace in traces
    }
    reference = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, found in answer_of(group).items():
        with torch.no_grad():
            sequence = torch.from_numpy(ids[row].astype(np.int64))[None]
            expected = reference(sequence).logits[0].log_softmax(-1)
        own = expected[:-1].gather(1, sequence[0, 1:, None])[:, 0].numpy()
        assert found[0] == 0.0
        np.testing.assert_allclose(found[1:], own, atol=1e-4)


def _trace_of(row: int, ids: np.ndarray) -> Any:
    trace = make_trace(f"trace-{row}", tokens=len(ids), seed=row)
    return type(trace)(
        **{name: getattr(trace, name) for name in trace.__struct_fields__}
        | {"token_ids": ids.astype("<i4").tobytes()}
    )


def test_a_teacher_that_hangs_delays_only_its_own_groups(new_run: Callable[..., Run]) -> None:
    release = threading.Event()

    def hanging(request: dict[str, Any]) -> Reply:
        release.wait(60)
        return echoed(request)

    with teacher_server(hanging) as slow, teacher_server() as quick:
        run = taught_by(
            new_run(),
            models={
                "slow": {"model_name": "slow", "base_url": slow},
                "quick": {"model_name": "quick", "base_url": quick},
            },
            agent_to_teacher={"sums": "slow", "products": "quick"},
            strict=True,
        )
        for task in range(8):
            agent = "products" if task % 2 else "sums"
            rows = make_rows(run.manifest, task, agent=agent)
            run.send_rows([(task, payload) for payload in rows])
        with assembler(run) as running:
            wait_for("groups of the quick one", lambda: len(run.groups()) == 4, running)
            assert {group.task_index for group in run.groups()} == {1, 3, 5, 7}
            wait_for(
                "the slow one's",
                lambda: run.heartbeat("a").get("groups_with_teacher") == 4,
                running,
            )
            release.set()
            wait_for("every group", lambda: len(run.groups()) == 8, running)
    for group in run.groups():
        for row, found in answer_of(group).items():
            ids = tokens(group.rows[row].traces[0].token_ids).tolist()
            assert found == [0.0, *(logprob_of(token) for token in ids[1:])]


def test_a_teacher_that_fails_fails_the_attempt(new_run: Callable[..., Run]) -> None:
    calls = []

    def failing(request: dict[str, Any]) -> Reply:
        calls.append(request)
        return (503, {}) if len(calls) <= 2 else echoed(request)

    with teacher_server(failing) as base_url:
        teacher = {"model_name": "t", "base_url": base_url, "max_retries": 1}
        run = taught_by(new_run(), models={"t": teacher}, default_teacher="t")
        run.send_rows([(0, payload) for payload in make_rows(run.manifest, 0)])
        with assembler(run) as running:
            wait_for("failure", lambda: bool(run.events(EventKind.ATTEMPT_FAILED)), running)
            run.send_rows([(0, payload) for payload in make_rows(run.manifest, 0, 1)])
            wait_for("the next attempt", lambda: len(run.groups()) == 1, running)
    (failed,) = run.events(EventKind.ATTEMPT_FAILED)
    assert (failed.attempt, failed.reason, failed.failure_class) == (0, "teacher_failed", "infra")
    assert "answered 503" in failed.message
    assert run.groups()[0].attempt == 1


def test_a_group_is_taught_while_it_waits_for_the_policy(new_run: Callable[..., Run]) -> None:
    with teacher_server() as base_url:
        run = taught_by(
            new_run(assembler_memory_bytes=4_000),  # two groups of the six fit
            models={"t": {"model_name": "t", "base_url": base_url}},
            default_teacher="t",
        )
        for task in range(6):
            rows = make_rows(run.manifest, task, target_step=2, version=1)
            run.send_rows([(task, payload) for payload in rows])
        with assembler(run) as running:
            wait_for("answers", lambda: run.heartbeat("a").get("teacher_groups/t", 0) > 0, running)
            assert run.groups() == []
            announce(run.config, 1)
            wait_for("six groups", lambda: len(run.groups()) == 6, running)
    assert all(len(group.teacher_logprobs) == 4 for group in run.groups())


def test_a_model_directory_that_is_none_is_an_error_at_start(new_run: Callable[..., Run]) -> None:
    teacher = {"model_name": "nowhere"}
    run = taught_by(new_run(), models={"t": teacher}, default_teacher="t")
    with assembler(run, ends_with=ConfigError, saying=r"teachers\.models\.t.*nowhere") as running:
        wait_for("the error", running.done)


def test_a_model_that_vllm_refuses_ends_with_its_words(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no such type"}')
    teacher = {"model_name": str(broken)}
    run = taught_by(new_run(), models={"t": teacher}, default_teacher="t")
    with assembler(run, ends_with=ConfigError, saying="(?s)vLLM ended.*no such type") as running:
        wait_for("the error", running.done, within_s=VLLM_STARTS_S)
