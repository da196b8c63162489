"""A process whose wall clock jumps while it runs, and roles that read no other clock than that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.clocks import SHIM, Clocks

ROOT = Path(__file__).parents[2]
WATCHES = """
import sys, time
for _ in range(3):
    print(time.time(), time.time_ns(), time.monotonic(), flush=True)
    sys.stdin.readline()
"""


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(tmp_path):
    clocks = Clocks(tmp_path, ["trainer", "dispatcher"])
    environment = os.environ | clocks.environment("trainer") | {"PYTHONPATH": str(SHIM)}
    seen = []
    with subprocess.Popen(
        [sys.executable, "-c", WATCHES],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for shift_s in (3600.0, -7200.0, 0.0):
            line = process.stdout.readline().split()
            seen.append((float(line[0]), int(line[1]) / 1e9, float(line[2])))
            clocks.jump("trainer", shift_s)
            clocks.jump("dispatcher", 60.0)
            process.stdin.write("\n")
            process.stdin.flush()
    walls = [wall - seen[0][0] for wall, _, _ in seen]
    assert walls == pytest.approx([0, 3600, -7200], abs=60)
    assert [ns - wall for wall, ns, _ in seen] == pytest.approx([0, 0, 0], abs=1)
    assert seen[2][2] - seen[0][2] < 60


def test_no_role_reads_a_clock_that_the_shim_leaves_alone():
    """It shifts time.time and time.time_ns; a date of the moment would still be true."""
    clock = re.compile(r"datetime\.(now|utcnow|today)|from time import|time\.(localtime|gmtime)\(")
    packages = ("schemas", "producers", "consumers", "trainer")
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 50
    assert [str(path) for path in files if clock.search(path.read_text())] == []
