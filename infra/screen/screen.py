"""Draws the run: live on a terminal, else a line of text every few seconds."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from infra.screen.facts import RunFacts
from infra.screen.line import line_of
from infra.screen.metrics_file import MetricsFile
from infra.screen.panel import panel_of
from infra.screen.view import Process, View, view_of
from infra.status_log import StatusLog
from schemas.config import Config
from schemas.control import ControlState
from schemas.status import now_ms
from schemas.topics import Topics

DRAW_S = 0.5
LINE_S = 5.0


class Screen:
    """A context manager; update() from the one thread that made it, as often as one likes."""

    def __init__(self, config: Config, console: Console, started_s: float) -> None:
        """`started_s` is on the monotonic clock."""
        self.facts = RunFacts()
        self._config, self._console, self._started_s = config, console, started_s
        self._status = StatusLog(config.kafka, Topics(config.run.id), f"{config.run.id}.screen")
        self._metrics = MetricsFile(config.metrics_path)
        self._drawn_s = 0.0
        self._notice = ""
        live = console.is_terminal
        self._live = Live(console=console, auto_refresh=False, transient=False) if live else None

    def note(self, text: str) -> None:
        """Something that happened: above the live panel, or a line of its own."""
        self._notice = text
        self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def update(
        self,
        control: ControlState,
        processes: Callable[[], Sequence[Process]],
        *,
        now: bool = False,
    ) -> None:
        """Draws when it is time to; `now`: in any case."""
        period_s = DRAW_S if self._live is not None else LINE_S
        if not now and time.monotonic() - self._drawn_s < period_s:
            return
        self._drawn_s = time.monotonic()
        self._draw(self.view(control, processes()))

    def view(self, control: ControlState, processes: Sequence[Process]) -> View:
        for heartbeat in self._status.poll():
            self.facts.hear(heartbeat)
        self.facts.control = control
        self.facts.steps = self._metrics.changed() or self.facts.steps
        return view_of(
            self.facts,
            processes,
            run_id=self._config.run.id,
            total_steps=self._config.grpo.max_num_steps,
            elapsed_s=time.monotonic() - self._started_s,
            now_ms=now_ms(),
            notice=self._notice,
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._status.close()

    def _draw(self, view: View) -> None:
        if self._live is not None:
            self._live.update(panel_of(view), refresh=True)
        else:
            self._console.print(line_of(view), markup=False, highlight=False, soft_wrap=True)
