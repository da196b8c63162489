"""`groupstream-trainer`: trains the groups of each step; one process a rank under torchrun."""

import os
import threading

import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from infra.trainer_ranks import ranks_of
from schemas.config import Config
from schemas.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def main(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run the trainer. With more ranks than one, start it by torchrun."""
    rank = os.environ.get("RANK", "0")
    log_name = "trainer" if rank == "0" else f"trainer-rank-{rank}"
    raise typer.Exit(run_role("trainer", config, overrides, _train, log_name=log_name))


def _train(config: Config, stop: threading.Event) -> None:
    running, wanted = int(os.environ.get("WORLD_SIZE", "1")), ranks_of(config)
    if running != wanted:
        raise ConfigError(
            f"the trainer runs with {running} ranks, policy.megatron_cfg asks for {wanted}: start "
            f"it with `torchrun --nproc-per-node {wanted} -m infra.cli.trainer ...`, or use "
            "`groupstream up`"
        )
    from trainer.loop import run  # noqa: PLC0415

    run(config, stop=stop)


if __name__ == "__main__":
    app()
