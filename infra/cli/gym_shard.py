"""`groupstream-gym-shard`: runs the rollouts of one shard and streams their rows."""

import threading
from typing import Annotated

import typer

from infra.cli.options import ConfigFile, Overrides
from infra.cli.role import run_role
from schemas.config import Config
from schemas.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: ConfigFile,
    shard: Annotated[str, typer.Option(help="The shard's name in the configuration.")],
    replica: Annotated[int, typer.Option(min=0, help="Which of its replicas this is.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Run one replica of a gym shard."""

    def roll_out(config: Config, stop: threading.Event) -> None:
        require_replica(config, shard, replica)
        from producers.gym_shard import run  # noqa: PLC0415

        run(config, shard=shard, replica=replica, stop=stop)

    name = f"gym-shard-{shard}-{replica}"
    raise typer.Exit(run_role(name, config, overrides, roll_out))


def require_replica(config: Config, shard: str, replica: int) -> None:
    """Raises ConfigError for a shard or a replica that the configuration does not have."""
    shards = config.all_shards
    if shard not in shards:
        raise ConfigError(f"--shard {shard}: the configuration has the shards {sorted(shards)}")
    if replica >= shards[shard].replicas:
        raise ConfigError(
            f"--replica {replica}: shards.{shard}.replicas is {shards[shard].replicas}, so its "
            f"replicas are 0 to {shards[shard].replicas - 1}"
        )


if __name__ == "__main__":
    app()
