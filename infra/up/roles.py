"""Which processes a run is on one machine, and their command lines. Pure."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.cli.logs import CAPTURED
from infra.trainer_ranks import ranks_of
from infra.up.parent import SUPERVISOR_PID
from schemas.config import Config


@dataclass(frozen=True)
class RoleProcess:
    """`key` is the process's name on the `status` topic, role/instance."""

    name: str
    key: str
    command: list[str]
    through_torchrun: bool = False  # torchrun answers 1 whatever its ranks' exit codes were


def roles_of(
    config: Config, config_file: Path, overrides: list[str], assemblers: int, *, port: int
) -> list[RoleProcess]:
    """In the order in which they are stopped: who makes new work first, who trains it last.

    `port` on 127.0.0.1 is where the ranks of a trainer with several of them meet.
    """
    common = ["--config", str(config_file), *overrides]
    shards = [
        RoleProcess(
            f"gym-shard-{name}-{replica}",
            f"gym-shard/{name}/{replica}",
            [*_module("gym_shard"), "--shard", name, "--replica", str(replica), *common],
        )
        for name, shard in sorted(config.all_shards.items())
        for replica in range(shard.replicas)
    ]
    return [
        RoleProcess("dispatcher", "dispatcher/0", [*_module("dispatcher"), *common]),
        *shards,
        *(
            RoleProcess(
                f"assembler-{instance}",
                f"assembler/{instance}",
                [*_module("assembler"), "--instance", str(instance), *common],
            )
            for instance in range(assemblers)
        ),
        _trainer(ranks_of(config), common, port),
    ]


def environment_of(inherited: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """The environment of every role: `processes` of them compute at the same time."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores // max(1, processes))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::SyntaxWarning",  # of libraries, once at each installation
        **inherited,
        CAPTURED: "1",
        SUPERVISOR_PID: str(os.getpid()),
    }


def _trainer(ranks: int, common: list[str], port: int) -> RoleProcess:
    if ranks == 1:
        return RoleProcess("trainer", "trainer/0", [*_module("trainer"), *common])
    torchrun = [
        *[sys.executable, "-m", "torch.distributed.run"],
        *["--nproc-per-node", str(ranks), "--max-restarts", "0"],
        *["--master-addr", "127.0.0.1", "--master-port", str(port)],
        *["-m", "infra.cli.trainer"],
    ]
    return RoleProcess("trainer", "trainer/0", [*torchrun, *common], through_torchrun=True)


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", f"infra.cli.{name}"]
