"""The command lines of `groupstream dlq`, `groups` and `rows`, as far as they need no broker."""

import subprocess
import sys
import textwrap

import pytest
import typer
from typer.testing import CliRunner

from infra.cli.dlq import selected
from infra.cli.main import app
from infra.inspection.stored import Place

DEMO = "infra/configs/demo.yaml"
COMMANDS = [
    *("dlq list", "dlq show 0 1", "dlq replay --all", "dlq drop --all", "groups ls"),
    *("groups show 1", "rows 1"),
]


def call(line):
    return CliRunner().invoke(app, line.split())


def test_help_comes_without_the_heavy_libraries():
    code = textwrap.dedent("""
        import sys
        from typer.testing import CliRunner
        from infra.cli.main import app
        for words in (["dlq", "replay"], ["groups", "ls"], ["rows"]):
            result = CliRunner().invoke(app, [*words, "--help"])
            assert result.exit_code == 0, result.output
            assert "--json" in result.output
        heavy = {"torch", "vllm", "transformers", "megatron", "confluent_kafka"} & set(sys.modules)
        assert not heavy, heavy
    """)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", COMMANDS)
def test_without_a_broker_there_is_one_message(line):
    result = call(f"{line} --config {DEMO}")
    assert result.exit_code == 1
    assert "kafka.bootstrap_servers is not set" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("line", COMMANDS)
def test_values_go_over_the_files(line):
    result = call(f"{line} grpo.max_num_stepz=3 --config {DEMO}")
    assert result.exit_code == 1
    assert "did you mean grpo.max_num_steps?" in result.stderr


def test_a_selection_is_a_place_a_reason_or_everything():
    selection, overrides = selected(["1", "17", "kafka.a=b"], None, False, True)
    assert (selection.place, selection.resolved_too) == (Place(1, 17), True)
    assert overrides == ["kafka.a=b"]
    assert selected([], "malformed", False, False)[0].reason == "malformed"
    assert selected(["a=b"], None, True, False)[0].place is None


@pytest.mark.parametrize(
    ("where", "reason", "everything"),
    [
        ([], None, False),
        (["a=b"], None, False),
        (["1", "2"], None, True),
        ([], "malformed", True),
        (["1"], None, False),
        (["1", "2", "3"], None, False),
        (["1", "-2"], None, False),
        (["one", "two"], None, False),
    ],
)
def test_any_other_selection_is_refused(where, reason, everything):
    with pytest.raises(typer.BadParameter, match="PARTITION OFFSET"):
        selected(where, reason, everything, False)


@pytest.mark.parametrize("line", ["dlq replay", "dlq drop 1", "dlq replay 0 1 --all"])
def test_a_refused_selection_is_a_usage_error(line):
    result = call(f"{line} --config {DEMO}")
    assert result.exit_code == 2
    assert "PARTITION OFFSET" in result.stderr


def test_a_state_that_there_is_not_is_refused_with_those_there_are():
    result = call(f"groups ls --state lost --config {DEMO}")
    assert result.exit_code == 2
    assert "abandoned" in result.stderr
