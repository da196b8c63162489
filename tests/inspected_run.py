"""A run in which everything happens once, told to a real assembler, and `groupstream` about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import yaml
from typer.testing import CliRunner

from infra.cli.main import app
from schemas import topics as keys
from schemas.codec import encode
from schemas.identity import key_of
from schemas.records import CheckpointRecorded, LedgerTask, LedgerTotals, TaskState
from tests.assembling import Run, assembler, wait_for
from tests.rows import make_cancel, make_failed, make_row, make_rows, make_started
from tests.run import control, send

TASKS = 8


@contextmanager
def told(run: Run) -> Iterator[Run]:
    """The story; the assembler still runs. Step 0 is trained, in the newest checkpoint."""
    send_ledger(run)
    send_story(run)
    checkpoint = CheckpointRecorded(
        step=1, directory="d", offsets={"0": 1, "1": 1}, next_task_index=TASKS, recorded_at_ms=1
    )
    control(run.config, keys.CONTROL_CHECKPOINT, encode(checkpoint))
    with assembler(run) as running:
        wait_for("3 groups", lambda: len(run.groups()) == 3, running)
        wait_for("4 dead letters", lambda: len(run.dead_letters()) == 4, running)
        yield run


def groupstream(run: Run, line: str, *, fails: bool = False, as_json: bool = True) -> Any:
    """The command with the run's file: what it printed as JSON, or its exit code and errors."""
    file = Path(run.config.run.directory) / "config.yaml"
    file.write_text(yaml.safe_dump(run.config.model_dump(mode="json", exclude_unset=True)))
    arguments = [*line.split(), "--config", str(file), *(["--json"] if as_json else [])]
    result = CliRunner().invoke(app, arguments)
    if fails:
        return result.exit_code, result.stderr
    assert result.exit_code == 0, (result.stderr, result.exception)
    if not as_json:
        return result.stdout
    return [orjson.loads(printed) for printed in result.stdout.splitlines()]


def send_story(run: Run) -> None:
    """Partition 0: tasks 0, 2, 4, 6; partition 1: tasks 1, 3, 5, 7, of which 7 sends nothing."""
    manifest = run.manifest

    def row(task: int, index: int, attempt: int = 0, **changes: Any) -> tuple[int, bytes]:
        return task, encode(make_row(manifest, task, index, attempt, **changes))

    stray = encode(make_row(manifest, 2, 3))
    run.send_rows(
        [
            (0, encode(make_started(manifest, 0))),
            *(row(0, index) for index in (2, 0)),
            row(0, 0),  # partition 0, offset 3: a duplicate
            *(row(0, index) for index in (1, 3)),
            row(0, 1),  # offset 6: late
            *(row(2, index) for index in range(3)),
            row(4, 0),
            row(4, 0, reward=0.25),  # offset 11: in conflict with its elder
            *(row(6, index) for index in range(2)),
            (1, encode(make_started(manifest, 1))),
            row(1, 0),
            (1, encode(make_failed(manifest, 1))),  # partition 1, offset 2
            *((1, value) for value in make_rows(manifest, 1, 1)),
            row(3, 0),
            (3, encode(make_cancel(manifest, 3))),  # offset 8
            *((5, value) for value in make_rows(manifest, 5, target_step=1)),
        ]
    )
    bad = [(1, key_of(2), stray), (0, b"k", b"not avro"), (0, key_of(4), None)]
    send(run.config, run.topics.rows, bad)


def send_ledger(run: Run) -> None:
    """As the dispatcher would have it after the story, a moment late: 5 is still outstanding."""

    def task(index: int, **more: Any) -> tuple[int, bytes, bytes]:
        fields = {
            "task_index": index, "attempt": 0, "target_step": 0, "epoch": 0, "position": index,
            "agent": "sums", "shard": "gym", "replica": 0, "partition": 0, "seq": index,
            "min_version": 0, "rowidx_start": 0, "dispatched_at_ms": 100 + index,
        }  # fmt: skip
        return 0, key_of(index), encode(LedgerTask(**fields | more))

    totals = LedgerTotals(
        next_task_index=TASKS, dispatched=TASKS, accepted=2, abandoned={"attempts_exhausted": 1}
    )
    records = [
        *(task(index) for index in range(TASKS)),
        task(1, attempt=1),
        task(4, state=TaskState.WAITING),
        *((0, key_of(index), None) for index in (0, 1, 3)),
        (0, keys.LEDGER_TOTALS.encode(), encode(totals)),
    ]
    send(run.config, run.topics.dispatch, records)
