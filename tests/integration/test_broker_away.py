"""The broker killed and started again under load, at once and after a minute.

On a single node a coordinator can't move to another broker; what a move has in common with a
restart, that the coordinator's partition is loaded anew, is covered here.
"""

import time
from pathlib import Path

from infra.broker import start_broker
from schemas.records import EventKind
from tests.assembling import assert_whole, create, wait_for
from tests.broker import JAVA_ALONE
from tests.outage import ENDS_TO_START_AGAIN, Load, ends_of, kept_alive

AWAY_S = 60.0
RECOVERS_S = 45.0  # from the broker's first answer to a next group; 12 s on an idle machine


def test_the_broker_is_killed_and_comes_back_at_once_and_after_a_minute(tmp_path: Path) -> None:
    with start_broker(tmp_path / "broker", progress=print, ways=JAVA_ALONE) as broker:
        run = create(broker.bootstrap_servers, "away", tmp_path, session_timeout_ms=5000)
        with Load(run) as load, kept_alive(run, tmp_path, "a"), kept_alive(run, tmp_path, "b"):
            wait_for("a group", lambda: len(run.groups()) > 0)
            for away_s in (0.0, AWAY_S):
                before = len(run.groups())
                broker.kill()
                time.sleep(away_s)
                broker.restart()
                back_s = time.monotonic()
                wait_for("new groups", lambda: len(run.groups()) > before + 20)  # noqa: B023
                recovery_s = time.monotonic() - back_s
                print(f"away {away_s:.0f} s: groups go on after {recovery_s:.1f} s")
                assert recovery_s < RECOVERS_S
            load.stop()
            wait_for("every record's end", run.is_drained)
        assert_whole(run, run.groups(), load.sent)
        accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
        assert sorted(accepted) == list(range(load.tasks))
        for end in ends_of(run, tmp_path, "a", "b"):
            assert end.startswith(ENDS_TO_START_AGAIN), end
