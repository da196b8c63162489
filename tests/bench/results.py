"""What a benchmark prints and writes."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """`ratio` is value / baseline; both are None for a figure that stands alone."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


def against(name: str, unit: str, values: Sequence[float], baselines: Sequence[float]) -> Result:
    """Medians, and the median of the ratios of runs that were neighbours in time."""
    ratios = [value / base for value, base in zip(values, baselines, strict=True)]
    return Result(
        name,
        statistics.median(values),
        unit,
        statistics.median(baselines),
        statistics.median(ratios),
    )


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    rank = max(0, -(-len(sorted_values) * percent // 100) - 1)
    return sorted_values[int(rank)]


def write(results: Sequence[Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps([asdict(r) for r in results], option=orjson.OPT_INDENT_2))
    table = Table("figure", "value", "unit", "baseline", "ratio")
    for r in results:
        baseline = "" if r.baseline is None else f"{r.baseline:,.1f}"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        table.add_row(r.name, f"{r.value:,.1f}", r.unit, baseline, ratio)
    Console().print(table)
    Console().print(f"written to {path}")
