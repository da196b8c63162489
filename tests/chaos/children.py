"""The real roles of a chaos run, each behind a network and a clock of its own."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from infra.up.child import Child
from infra.up.roles import RoleProcess, environment_of, roles_of
from schemas.config import Config
from tests.chaos.clocks import SHIM, Clocks
from tests.chaos.network import Network
from tests.chaos.recorder import STEP_VARIABLE

ROOT = Path(__file__).parents[2]


def roles_under_test(config: Config, config_file: Path, assemblers: int) -> list[RoleProcess]:
    """The recorder stands in the trainer's place."""
    roles = roles_of(config, config_file, [], assemblers, port=0)
    recorder = [sys.executable, "-m", "tests.chaos.recorder", "--config", str(config_file)]
    return [replace(role, command=recorder) if role.name == "trainer" else role for role in roles]


@dataclass(frozen=True)
class Surroundings:
    """Where the roles' processes find themselves: call it with a role for a process of it."""

    logs: Path
    network: Network
    clocks: Clocks
    step_s: float

    def __call__(self, role: RoleProcess) -> Child:
        self.logs.mkdir(parents=True, exist_ok=True)
        environment = environment_of(os.environ, 1, 1) | self.clocks.environment(role.name)
        path = [str(SHIM), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            STEP_VARIABLE: str(self.step_s),
        }
        return Child(role, self.logs, environment)

    def behind_proxy(self, role: RoleProcess) -> RoleProcess:
        """The role, told the address of its own proxy."""
        servers = f"kafka.bootstrap_servers={self.network.servers(role.name)}"
        return replace(role, command=[*role.command, servers])
