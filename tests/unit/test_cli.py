"""The command lines: settings, errors without tracebacks, exit codes, and what stays unimported."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from infra.cli import gym_shard
from infra.demo.latest import LatestRun, read_latest, write_latest
from infra.demo.settings import parse_settings
from infra.up.lock import only_one
from infra.up.pid_file import read_pids, write_pids
from schemas.config_file import load_config
from schemas.errors import ConfigError

DEMO = "infra/configs/demo.yaml"
MODULES = ["init", "dispatcher", "gym_shard", "assembler", "trainer", "monitor", "main"]


def python(*arguments, **more):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )


@pytest.mark.parametrize("module", MODULES)
def test_help_comes_without_the_heavy_libraries(module):
    code = textwrap.dedent(f"""
        import sys
        from typer.testing import CliRunner
        from infra.cli.{module} import app
        result = CliRunner().invoke(app, ["--help"])
        assert result.exit_code == 0, result.output
        heavy = {{"torch", "vllm", "transformers", "megatron", "reasoning_gym"}} & set(sys.modules)
        assert not heavy, heavy
    """)
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_a_wrong_key_is_one_message_and_exit_code_1(tmp_path):
    result = python("-m", "infra.cli.dispatcher", "--config", DEMO, "grpo.max_num_stepz=3")
    assert result.returncode == 1
    assert "did you mean grpo.max_num_steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_broker_is_one_message(tmp_path):
    result = python(
        *["-m", "infra.cli.init", "--config", DEMO, f"run.directory={tmp_path}"],
    )
    assert result.returncode == 1
    assert "kafka.bootstrap_servers is not set" in result.stderr
    assert "Traceback" not in result.stderr
    assert "kafka.bootstrap_servers is not set" in (tmp_path / "demo/logs/init.log").read_text()


def test_an_unexpected_error_leaves_its_traceback_and_another_exit_code(tmp_path):
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from infra.cli.role import run_role
        def role(config, stop):
            raise ZeroDivisionError("seven by zero")
        sys.exit(run_role("tester", Path("{DEMO}"), ["run.directory={tmp_path}"], role))
    """)
    result = python("-c", code)
    assert result.returncode == 70
    assert "ZeroDivisionError: seven by zero" in result.stderr
    assert "ZeroDivisionError" in (tmp_path / "demo/logs/tester.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_role_to_stop(tmp_path, number):
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from infra.cli.role import run_role
        def role(config, stop):
            print("ready", flush=True)
            assert stop.wait(60)
        sys.exit(run_role("tester", Path("{DEMO}"), ["run.directory={tmp_path}"], role))
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(30) == 0


def test_a_role_ends_with_its_supervisor():
    """The supervisor is killed: it can't tell anybody."""
    child = textwrap.dedent("""
        import os, time
        from infra.up.parent import die_with_supervisor
        die_with_supervisor()
        print(os.getpid(), flush=True)
        time.sleep(60)
    """)
    supervisor = textwrap.dedent(f"""
        import os, subprocess, sys, time
        environment = os.environ | {{"GROUPSTREAM_SUPERVISOR_PID": str(os.getpid())}}
        subprocess.Popen([sys.executable, "-c", {child!r}], env=environment)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()
        # the pipe's end comes when the last process that holds it has ended
        assert process.stdout.read() == b""


def test_replicas_that_do_not_exist_are_refused():
    config = load_config(DEMO)
    gym_shard.require_replica(config, "adder", 0)
    with pytest.raises(ConfigError, match=r"--shard nobody.*\['adder', 'multiplier'\]"):
        gym_shard.require_replica(config, "nobody", 0)
    with pytest.raises(ConfigError, match=r"shards\.adder\.replicas is 1"):
        gym_shard.require_replica(config, "adder", 1)


def test_demo_settings():
    parsed = parse_settings(["seed=3", "steps=20", "kafka.num_partitions=8", "assemblers=2"])
    assert parsed.assemblers == 2
    config = load_config(DEMO, parsed.overrides)
    assert (config.grpo.seed, config.grpo.max_num_steps, config.kafka.num_partitions) == (3, 20, 8)


@pytest.mark.parametrize("setting", ["seed", "seed=", "stepz=4", "assemblers=none"])
def test_wrong_demo_settings_are_named(setting):
    with pytest.raises(ConfigError, match=setting.split("=", maxsplit=1)[0]):
        parse_settings([setting])


def test_the_latest_demo_run_is_remembered_while_its_files_are_there(tmp_path):
    assert read_latest(tmp_path) is None
    config_file = tmp_path / "config.yaml"
    config_file.write_text("")
    latest = LatestRun("r", str(config_file), 1, finished=False)
    write_latest(tmp_path, latest)
    assert read_latest(tmp_path) == latest
    config_file.unlink()
    assert read_latest(tmp_path) is None


def test_pids(tmp_path):
    assert read_pids(tmp_path) == {}
    write_pids(tmp_path, {"trainer": 12})
    assert read_pids(tmp_path) == {"trainer": 12}


def test_a_run_is_up_once(tmp_path):
    with only_one(tmp_path, print):
        code = (
            "from pathlib import Path; from infra.up.lock import only_one\n"
            f"with only_one(Path({str(tmp_path)!r}), print): pass"
        )
        result = python("-c", code)
        assert f"this run is up already, in process {os.getpid()}" in result.stderr
    with only_one(tmp_path, print):
        pass
