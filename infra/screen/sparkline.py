"""A row of numbers as a row of bars. Pure."""

from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """At most `width` characters, each the mean of its share of `values`.

    `low` and `high` are the values of the lowest and of the full bar; others are clamped.
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    shares = [values[a:b] for a, b in pairwise(edges)]
    span = (high - low) or 1.0
    heights = [(sum(share) / len(share) - low) / span for share in shares]
    return "".join(BARS[round(min(1.0, max(0.0, h)) * (len(BARS) - 1))] for h in heights)
