"""The view as one line of text, for logs. Pure."""

from textwrap import shorten

from infra.screen.view import RoleLine, View

AWAITED_WIDTH = 120


def line_of(view: View) -> str:
    """Without line breaks and colours."""
    parts = [f"[{view.elapsed_s:5.0f} s] step {view.step}/{view.total_steps}"]
    if view.rewards:
        means = (f"{agent} {values[-1]:.2f}" for agent, values in view.rewards.items())
        parts.append("reward " + " ".join(means))
    parts.append(f"groups {view.groups_accepted}/{view.groups_dispatched}")
    parts.append(f"rows in flight {view.rows_in_flight}")
    if view.staleness is not None:
        parts.append(f"staleness {view.staleness:.1f}")
    parts.append(f"{view.generated_tokens_per_s:.0f} tok/s")
    parts.append(f"awaited: {shorten(view.awaited, AWAITED_WIDTH, placeholder=' ...')}")
    unwell = [f"{role.name} {role.state} {role.doing}" for role in view.roles if _is_unwell(role)]
    if unwell:
        parts.append("; ".join(unwell))
    return " · ".join(part.replace("\n", " ") for part in parts)


def _is_unwell(role: RoleLine) -> bool:
    return role.troubled or role.state.startswith("restarting")
