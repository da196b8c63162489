"""The view as rich text for a terminal."""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from infra.screen.sparkline import sparkline
from infra.screen.view import RoleLine, View

PLOT_WIDTH = 40
RECENT = 5


def panel_of(view: View) -> RenderableType:
    parts: list[RenderableType] = [_progress(view), Text(), _rewards(view), Text(), _flow(view)]
    parts += [Text(), _roles(view.roles)]
    if view.notice:
        parts += [Text(), Text(view.notice, style="yellow")]
    title = f"[bold]groupstream[/bold]  {view.run_id}"
    return Panel(Group(*parts), title=title, title_align="left", border_style="cyan")


def _progress(view: View) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, view.total_steps), completed=view.step, width=PLOT_WIDTH)
    counted = Text(f"step {view.step} / {view.total_steps}", style="bold")
    grid.add_row(counted, bar, Text(f"{view.elapsed_s:.0f} s", style="dim"))
    return grid


def _rewards(view: View) -> RenderableType:
    if not view.rewards:
        return Text("mean reward: no step is trained yet", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text("mean reward", style="bold"),
        Text(f"first {RECENT}", style="dim"),
        Text(f"last {RECENT}", style="dim"),
        Text("step by step, the full bar is the best", style="dim"),
    )
    everything = [value for values in view.rewards.values() for value in values]
    low, high = min(0.0, *everything), max(1.0, *everything)
    for agent, values in view.rewards.items():
        style = "bold green" if agent == "all" else "green"
        grid.add_row(
            Text(f"  {agent}"),
            Text(f"{_mean(values[:RECENT]):.2f}"),
            Text(f"{_mean(values[-RECENT:]):.2f}", style="bold"),
            Text(sparkline(values, PLOT_WIDTH, low, high), style=style),
        )
    return grid


def _flow(view: View) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    groups = f"{view.groups_accepted} accepted of {view.groups_dispatched} dispatched"
    if view.groups_abandoned:
        groups += f", {view.groups_abandoned} abandoned"
    staleness = "-" if view.staleness is None else f"{view.staleness:.1f} versions"
    generated, trained = view.generated_tokens_per_s, view.trained_tokens_per_s
    for name, value in (
        ("groups", groups),
        ("rows in flight", str(view.rows_in_flight)),
        ("staleness", staleness),
        ("tokens/s", f"{generated:,.0f} generated, {trained:,.0f} trained"),
        ("awaited", view.awaited),
    ):
        grid.add_row(Text(name, style="bold"), Text(value))
    return grid


def _roles(roles: list[RoleLine]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for _ in ("mark", "name", "state", "doing", "since"):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    for role in roles:
        state = role.state + (f", restarts: {role.restarts}" if role.restarts else "")
        since = "" if role.since_s is None else f"{role.since_s:.0f} s"
        running = role.state == "running"
        style = "red" if role.troubled else "green" if running else "yellow"
        grid.add_row(
            Text("●", style=style),
            Text(role.name),
            Text(state, style="dim" if running else "yellow"),
            Text(role.doing, style="red" if role.troubled else ""),
            Text(since, style="dim"),
        )
    return grid


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
