"""`python -m infra.broker --directory DIR`: a broker until Ctrl-C or SIGTERM."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from infra.broker.broker import Broker
from infra.broker.errors import BrokerError
from infra.broker.provision import start_broker
from infra.broker.settings import DEFAULT_RECORD_BYTES

_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def main(
    directory: Annotated[Path, typer.Option(help="Its data, settings, log and record.")],
    bootstrap_servers: Annotated[
        str | None, typer.Option(help="A cluster that runs already; none is started.")
    ] = None,
    record_bytes: Annotated[
        int, typer.Option(help="The largest record value that it must take.")
    ] = DEFAULT_RECORD_BYTES,
    port: Annotated[int | None, typer.Option(help="On 127.0.0.1; by default a free one.")] = None,
    json: Annotated[bool, typer.Option(help="Print one line of JSON when it answers.")] = False,
) -> None:
    """Start a single-node Kafka broker on this machine and keep it until Ctrl-C or SIGTERM."""
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a start is broken off, and undone
    try:
        with start_broker(
            directory,
            bootstrap_servers=bootstrap_servers,
            record_bytes=record_bytes,
            port=port,
            progress=_report,
        ) as broker:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: told_to_stop.set())
            _announce(broker, as_json=json)
            told_to_stop.wait()
            _report("stopping")
    except (BrokerError, ValueError, OSError) as error:
        _errors.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error


def _report(text: str) -> None:
    _errors.print(text, style="dim", markup=False)


def _announce(broker: Broker, *, as_json: bool) -> None:
    facts = {
        "bootstrap_servers": broker.bootstrap_servers,
        "how": broker.how,
        "pid": broker.pid,
        "container": broker.container,
        "log": str(broker.log_path) if broker.log_path else None,
    }
    if as_json:
        print(orjson.dumps(facts).decode(), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        if value is not None:
            console.print(f"[bold]{name:18}[/bold]{value}")


typer.run(main)
