"""What the supervisor does about a role that ended, and how it starts the roles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.exit_codes import ExitCode, exit_code_of
from infra.up.policy import (
    ERRORS_IN_A_ROW,
    KILLS_IN_A_ROW,
    LONGEST_DELAY_S,
    SETTLED_S,
    Done,
    Restart,
    Stop,
    Supervision,
)
from infra.up.roles import environment_of, roles_of
from schemas.config import Config
from schemas.errors import ConfigError, DeadlineExceeded, Fenced, RunStopped


def judge(returncode, *, lived_s=1.0, finished=False, supervision=None):
    return (supervision or Supervision()).judge("trainer", returncode, lived_s, finished=finished)


def test_done_only_when_the_run_has_finished():
    assert judge(0, finished=True) == Done()
    assert isinstance(judge(0), Restart)


@pytest.mark.parametrize("returncode", [-9, -11, 70, 75, 3, 139])
def test_restarts_what_may_work_the_next_time(returncode):
    assert isinstance(judge(returncode), Restart)
    assert isinstance(judge(returncode, finished=True), Restart)


@pytest.mark.parametrize("returncode", [ExitCode.REFUSED, ExitCode.USAGE])
def test_stops_where_a_person_must_act(returncode):
    assert isinstance(judge(returncode), Stop)


def test_waits_longer_each_time_and_gives_up():
    supervision = Supervision()
    verdicts = [judge(70, supervision=supervision) for _ in range(ERRORS_IN_A_ROW)]
    delays = [verdict.delay_s for verdict in verdicts[:-1]]
    assert delays == [0.5, 1.0, 2.0, 4.0]
    assert verdicts[-1] == Stop(
        "trainer failed with exit code 70, 5 times in a row within 60 s each"
    )


def test_a_role_that_lived_long_begins_anew():
    supervision = Supervision()
    for _ in range(50):
        assert judge(70, lived_s=SETTLED_S, supervision=supervision) == Restart(
            0.5, "failed with exit code 70"
        )


def test_kills_are_forgiven_longer_than_errors():
    supervision = Supervision()
    verdicts = [judge(-9, supervision=supervision) for _ in range(KILLS_IN_A_ROW)]
    assert all(isinstance(verdict, Restart) for verdict in verdicts[:-1])
    assert verdicts[-1] == Stop("trainer was killed by SIGKILL, 20 times in a row within 60 s each")


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(-15, 255), st.floats(0, 200))))
def test_roles_do_not_share_failures_and_delays_are_bounded(ends):
    together, alone = Supervision(), {"a": Supervision(), "b": Supervision()}
    for role, returncode, lived_s in ends:
        verdict = together.judge(role, returncode, lived_s, finished=False)
        assert verdict == alone[role].judge(role, returncode, lived_s, finished=False)
        if isinstance(verdict, Restart):
            assert 0 < verdict.delay_s <= LONGEST_DELAY_S


def test_exit_codes_tell_what_to_do():
    assert exit_code_of(ConfigError("")) == exit_code_of(RunStopped("")) == 1
    assert exit_code_of(Fenced("")) == 3
    assert exit_code_of(DeadlineExceeded("")) == 75
    assert exit_code_of(ValueError("")) == 70


def config_of(**more):
    return Config.model_validate(
        {
            "run": {"id": "r"},
            "data": {"train_jsonl_fpath": "p"},
            "policy": {"model_name": "m", **more},
            "env": {"agents": {"sums": {"gym": "a:B"}, "products": {"gym": "a:B"}}},
            "shards": {"one": {"agents": ["sums"], "replicas": 2}, "two": {"agents": ["products"]}},
        }
    )


def test_roles_come_in_the_order_in_which_they_are_stopped(tmp_path):
    roles = roles_of(config_of(), tmp_path / "c.yaml", ["a.b=1"], assemblers=2, port=1)
    assert [role.name for role in roles] == [
        "dispatcher",
        "gym-shard-one-0",
        "gym-shard-one-1",
        "gym-shard-two-0",
        "assembler-0",
        "assembler-1",
        "trainer",
    ]
    assert roles[2].key == "gym-shard/one/1"
    for role in roles:
        assert role.command[-3:] == ["--config", str(tmp_path / "c.yaml"), "a.b=1"]
    assert roles[2].command[1:7] == [
        "-m",
        "infra.cli.gym_shard",
        "--shard",
        "one",
        "--replica",
        "1",
    ]


def test_a_trainer_with_more_ranks_runs_under_torchrun(tmp_path):
    config = config_of(megatron_cfg={"tensor_model_parallel_size": 2, "data_parallel_size": 3})
    trainer = roles_of(config, tmp_path, [], assemblers=1, port=4711)[-1]
    assert trainer.through_torchrun
    assert trainer.command[1:3] == ["-m", "torch.distributed.run"]
    assert trainer.command[trainer.command.index("--nproc-per-node") + 1] == "6"
    assert trainer.command[trainer.command.index("--master-port") + 1] == "4711"


def test_threads_are_shared_out_unless_the_user_says_otherwise():
    assert environment_of({}, processes=3, cores=16)["OMP_NUM_THREADS"] == "5"
    assert environment_of({}, processes=3, cores=2)["OMP_NUM_THREADS"] == "1"
    assert environment_of({"OMP_NUM_THREADS": "7"}, 3, 16)["OMP_NUM_THREADS"] == "7"
