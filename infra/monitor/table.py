"""A snapshot as rich tables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from infra.monitor.snapshot import PartitionLine, RoleStatus, Snapshot


def tables_of(snapshot: Snapshot) -> RenderableType:
    return Group(
        _headline(snapshot),
        Text(),
        _partitions(snapshot.partitions),
        Text(),
        _roles(snapshot.roles),
    )


def _headline(snapshot: Snapshot) -> RenderableType:
    well = snapshot.state in ("running", "finished")
    text = Text.assemble(
        (f"run {snapshot.run_id}  ", "bold"),
        (snapshot.state, "green" if well else "bold red"),
        f"  step {snapshot.step}",
    )
    if snapshot.last_target is not None:
        text.append(f" of {snapshot.last_target + 1}")
    if snapshot.checkpoint_step is not None:
        text.append(f", checkpoint at step {snapshot.checkpoint_step}")
    text.append(
        f"\ntasks: {snapshot.dispatched} dispatched = {snapshot.groups_accepted} accepted + "
        f"{snapshot.abandoned} abandoned + {snapshot.outstanding} outstanding"
        f"\ngroups: {snapshot.open_groups} open, {snapshot.held_groups} held by a full buffer"
    )
    if snapshot.dead_letters:
        text.append(f"\ndead letters: {snapshot.dead_letters}", style="yellow")
    return text


def _partitions(lines: list[PartitionLine]) -> RenderableType:
    table = Table(title="rows, by partition", title_justify="left", box=None, padding=(0, 1))
    for name in ("partition", "committed", "read", "end", "unread", "held", "settled", "dlq", ""):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        numbers = (
            line.partition,
            line.committed,
            line.position,
            line.end,
            line.unread,
            line.held,
            line.settled_tasks,
            line.dead_letters,
        )
        table.add_row(*map(str, numbers), Text(line.problem, style="red"))
    return table


def _roles(roles: list[RoleStatus]) -> RenderableType:
    table = Table(title="processes", title_justify="left", box=None, padding=(0, 2))
    for name in ("", "process", "pid", "does or waits for", "since"):
        table.add_column(name)
    for role in roles:
        style = "red" if role.stalled else "dim" if role.ended else "green"
        table.add_row(
            Text("●", style=style),
            f"{role.role} {role.instance}",
            str(role.pid),
            Text(role.trouble or role.doing, style="red" if role.stalled else ""),
            f"{role.since_s:.0f} s",
        )
    return table
