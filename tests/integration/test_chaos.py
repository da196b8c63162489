"""The chaos suite's own command, for half a minute: kill -9, stops, a broker that goes and comes.

It has a broker of its own, because it kills it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 480.0  # about 70 s on two calm cores


def test_every_task_is_accounted_for_once_whatever_dies(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "seed=7", "seconds=25"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=ENDS_WITHIN_S)
        finally:
            process.send_signal(signal.SIGTERM)  # it ends what it started; nothing once it ended
    assert process.returncode == 0, output
    sums = json.loads((tmp_path / "build/chaos.json").read_bytes())
    assert sums["kills"] > 1
    assert sums["stops"] + sums["broker_restarts"] > 1
    assert sums["accepted"] > 0
    assert sums["dispatched"] == sums["accepted"] + sum(sums["abandoned"].values())
    assert [sums[name] for name in ("outstanding", "lost", "doubled", "out_of_order")] == [0] * 4
    assert sums["longest_recovery_s"] > 0
    assert not (tmp_path / "build/chaos/7").exists()
