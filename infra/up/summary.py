"""What `groupstream up` says at the end."""

from pathlib import Path

from rich.console import Console

from infra.up.supervisor import Outcome
from schemas.config import Config


def print_summary(console: Console, config: Config, config_file: Path, outcome: Outcome) -> None:
    for name, value in summary_rows(config, config_file, outcome):
        console.print(f"{name:<16}", style="bold", end="")
        console.print(value, markup=False, highlight=False, soft_wrap=True)


def summary_rows(config: Config, config_file: Path, outcome: Outcome) -> list[tuple[str, str]]:
    """Name and value of each line. Pure."""
    again = f"groupstream up --config {config_file}"
    if outcome.finished:
        ended, then = "finished", "start another run with another run.id"
    elif outcome.problem:
        ended, then = outcome.problem, f"look into {config.log_directory}, then: {again}"
    else:
        ended, then = "stopped, every process has ended", f"go on with: {again}"
    codes = ", ".join(f"{role} {code}" for role, code in outcome.exit_codes.items())
    rows = [("run", config.run.id), ("ended", ended), ("exit codes", codes)]
    if outcome.restarts:
        told = ", ".join(f"{role} {count}" for role, count in outcome.restarts.items())
        rows.append(("restarts", told))
    return [
        *rows,
        ("weights", str(config.weights_directory)),
        ("checkpoints", str(config.checkpoint_directory)),
        ("logs", str(config.log_directory)),
        ("next", then),
    ]
