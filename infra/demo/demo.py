"""Makes the demo's model and prompts, runs everything, audits the run, and says how it went."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson
from omegaconf import OmegaConf
from rich.console import Console
from rich.prompt import Prompt

from infra.audit import Audit, audit_run
from infra.cli.exit_codes import ExitCode
from infra.cli.logs import log_to_file
from infra.demo.latest import LatestRun, read_latest, write_latest
from infra.demo.materials import make_materials
from infra.demo.result import DemoResult, lines_of, result_of, what_to_try
from infra.demo.settings import parse_settings
from infra.screen.metrics_file import MetricsFile
from infra.up.run import Launch, Session, up
from infra.up.supervisor import Outcome
from schemas.config_file import load_config

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
INTERRUPTED = 130  # as a shell says it of Ctrl-C


def run_demo(
    settings: Sequence[str],
    go_on: bool | None,
    build: Path,
    console: Console,
    *,
    stop: threading.Event,
    hurry: threading.Event,
) -> int:
    """The exit code: 0 only if the run finished, every role ended with 0 and the audit holds.

    `go_on`: continue an unfinished run, or start a new one; None asks, where there is a terminal.
    Raises GroupstreamError.
    """
    started_s = time.monotonic()
    directory = build.absolute() / "demo"
    directory.mkdir(parents=True, exist_ok=True)
    run = _continued(directory, go_on, console) or _new_run(directory, settings)
    config = load_config(run.config_file)
    log_to_file(config.log_directory, "up")
    console.print(f"[bold]groupstream demo[/bold]  run {run.run_id}")
    make_materials(config, Path(run.config_file), _noting(console), stop)
    if stop.is_set():
        return _interrupted(console)
    write_latest(directory, run)

    audits: list[Audit] = []

    def audit(session: Session, outcome: Outcome) -> None:
        if outcome.finished:
            audits.append(audit_run(session.config, _noting(console)))

    launch = Launch(Path(run.config_file), (), run.assemblers)
    outcome = up(launch, console, stop=stop, hurry=hurry, inspect=audit)
    if not audits:
        return _unfinished(console, outcome)
    write_latest(directory, LatestRun(run.run_id, run.config_file, run.assemblers, finished=True))
    steps = MetricsFile(config.metrics_path).changed() or []
    result = result_of(run.run_id, steps, audits[0], outcome, time.monotonic() - started_s)
    written = build.absolute() / "demo.json"
    written.write_bytes(orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
    _summarise(console, result, lines_of(result, config, str(written)))
    return ExitCode.DONE if result.holds else ExitCode.REFUSED


def _continued(directory: Path, go_on: bool | None, console: Console) -> LatestRun | None:
    """The unfinished run that the user wants to continue."""
    latest = read_latest(directory)
    if latest is None or latest.finished or go_on is False:
        return None
    if go_on is None:
        if not (console.is_terminal and sys.stdin.isatty()):
            return None
        question = f"run {latest.run_id} did not finish: continue it, or start a new one"
        answer = Prompt.ask(question, choices=["continue", "new"], console=console)
        if answer == "new":
            return None
    return latest


def _new_run(directory: Path, settings: Sequence[str]) -> LatestRun:
    """Writes its configuration, complete, so that every role and the user can read it."""
    parsed = parse_settings(settings)
    run_id = f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    place = directory / "runs" / run_id
    own = [
        f"run.id={run_id}",
        f"run.directory={directory / 'runs'}",
        f"data.train_jsonl_fpath={place / 'prompts.jsonl'}",
        f"policy.model_name={place / 'model'}",
    ]
    load_config(CONFIG, [*own, *parsed.overrides])  # a wrong key must not leave a file behind
    tree = OmegaConf.merge(
        OmegaConf.load(CONFIG), OmegaConf.from_dotlist([*own, *parsed.overrides])
    )
    place.mkdir(parents=True, exist_ok=True)
    config_file = place / "config.yaml"
    OmegaConf.save(tree, config_file)
    return LatestRun(run_id, str(config_file), parsed.assemblers, finished=False)


def _noting(console: Console) -> Callable[[str], None]:
    def note(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    return note


def _interrupted(console: Console) -> int:
    console.print("stopped; every process has ended")
    return INTERRUPTED


def _unfinished(console: Console, outcome: Outcome) -> int:
    if outcome.stopped:
        console.print(
            "stopped in order, every process has ended. Continue: groupstream demo "
            "--continue; start anew: groupstream demo --new",
            highlight=False,
        )
        return INTERRUPTED
    console.print(outcome.problem, style="red", markup=False, highlight=False)
    return ExitCode.REFUSED


def _summarise(console: Console, result: DemoResult, lines: list[tuple[str, str]]) -> None:
    console.print()
    for name, value in lines:
        console.print(f"{name:<16}", style="bold", end="")
        console.print(value, markup=False, highlight=False, soft_wrap=True)
    for problem in [*result.audit.problems, result.outcome.problem]:
        if problem:
            console.print(problem, style="red", markup=False, highlight=False)
    console.print("\n[bold]what to try next[/bold]")
    for line in what_to_try():
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
