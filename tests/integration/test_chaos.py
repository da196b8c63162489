"""The chaos suite's own command, its short profile: every kind of fault within half a minute.

It has a broker of its own, because it kills it. A full disk needs root: elsewhere it is left out.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = 463  # one of few whose 25 seconds have every kind of fault
ENDS_WITHIN_S = 480.0  # about 70 s on two calm cores


def test_every_task_is_accounted_for_once_whatever_dies(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "short", f"seed={SEED}"],
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
    assert sums["problems"] == []
    has_disk = sums["no_disk_faults"] is None
    assert [kind for kind, count in sums["faults"].items() if not count] == (
        [] if has_disk else ["disk"]
    )
    assert sums["died_of_full_disk"] == sums["faults"]["disk"]
    assert sums["accepted"] > 0
    assert sums["dispatched"] == sums["accepted"] + sum(sums["abandoned"].values())
    zero = ("outstanding", "lost", "doubled", "out_of_order")
    assert [sums[name] for name in zero] == [0] * 4
    assert sums["longest_recovery_s"] > 0
    assert f"seed={SEED} seconds=25" in sums["replay"]
    assert not (tmp_path / f"build/chaos/{SEED}").exists()
