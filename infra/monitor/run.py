"""The monitor's loop: a snapshot every two seconds, shown, printed or served."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
from rich.console import Console
from rich.live import Live

from infra.monitor.collect import Collector
from infra.monitor.prometheus import serve
from infra.monitor.snapshot import Snapshot
from infra.monitor.table import tables_of
from schemas.config import Config

PERIOD_S = 2.0


def run(config: Config, *, as_json: bool, once: bool, stop: threading.Event) -> None:
    """Until `stop` is set. JSON: one object a line.

    Raises DeadlineExceeded, ManifestMismatch, ConfigError (the metrics port is taken).
    """
    console = Console()
    exporter = serve(config.logger.metrics_port) if config.logger.metrics_port else None
    live = console.is_terminal and not (as_json or once)
    with Collector(config) as collector, _shown_on(console, as_json=as_json, live=live) as show:
        while not stop.is_set():
            snapshot = collector.snapshot()
            if exporter is not None:
                exporter.show(snapshot)
            show(snapshot)
            if once or stop.wait(PERIOD_S):
                return


@contextmanager
def _shown_on(
    console: Console, *, as_json: bool, live: bool
) -> Iterator[Callable[[Snapshot], None]]:
    """What to do with each snapshot."""
    if as_json:
        yield lambda snapshot: print(orjson.dumps(snapshot.as_json()).decode(), flush=True)
    elif not live:
        yield lambda snapshot: console.print(tables_of(snapshot))
    else:
        with Live(console=console, auto_refresh=False) as screen:
            yield lambda snapshot: screen.update(tables_of(snapshot), refresh=True)
