"""Twenty thousand records that nobody should send; `make hostile` sends a million."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.assembling import create
from tests.hostile.attack import run_attack

RECORDS = 20_000


def test_each_hostile_record_ends_in_dlq_or_is_rightly_used(
    broker: Any, run_id: str, tmp_path: Path
) -> None:
    run = create(broker.bootstrap_servers, run_id, tmp_path)
    attack = partial(run_attack, run.config, run.manifest, tmp_path, say=print)
    outcome = attack(seed=7, records=RECORDS)
    assert outcome.problems == []
    assert outcome.verdict.fates["good groups"] == RECORDS // 100 // 4
    assert outcome.verdict.fates["dead letter"] > RECORDS / 2
