"""The demo's result, for programs (build/demo.json) and for people. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.audit.books import Audit
from infra.screen.facts import Step
from infra.up.supervisor import Outcome
from schemas.config import Config

AT_EACH_END = 5


@dataclass(frozen=True)
class DemoResult:
    """Rewards are means over the first and the last AT_EACH_END steps; None without a step."""

    run_id: str
    steps: int
    reward_first5: float | None
    reward_last5: float | None
    audit: Audit
    wall_s: float
    outcome: Outcome

    @property
    def holds(self) -> bool:
        """Whether the run finished, every role ended with 0 and the audit found nothing."""
        codes = self.outcome.exit_codes.values()
        return self.outcome.finished and not any(codes) and self.audit.holds

    def as_json(self) -> dict[str, Any]:
        audit = self.audit
        return {
            "run_id": self.run_id,
            "steps": self.steps,
            "reward_first5": self.reward_first5,
            "reward_last5": self.reward_last5,
            "dispatched": audit.dispatched,
            "accepted": audit.accepted,
            "abandoned": audit.abandoned,
            "outstanding": audit.outstanding,
            "lost": audit.lost,
            "doubled": audit.doubled,
            "wall_s": round(self.wall_s, 1),
            "exit_codes": self.outcome.exit_codes,
        }


def result_of(
    run_id: str, steps: Sequence[Step], audit: Audit, outcome: Outcome, wall_s: float
) -> DemoResult:
    means = [step.reward_mean for step in steps if step.reward_mean is not None]
    return DemoResult(
        run_id=run_id,
        steps=len(steps),
        reward_first5=_mean(means[:AT_EACH_END]),
        reward_last5=_mean(means[-AT_EACH_END:]),
        audit=audit,
        wall_s=wall_s,
        outcome=outcome,
    )


def lines_of(result: DemoResult, config: Config, written: str) -> list[tuple[str, str]]:
    """Name and value of each line of the summary."""
    audit, outcome = result.audit, result.outcome
    abandoned = ", ".join(f"{n} {reason}" for reason, n in sorted(audit.abandoned.items())) or "0"
    restarts = ", ".join(f"{role} {n} times" for role, n in outcome.restarts.items()) or "none"
    codes = [f"{role} {code}" for role, code in outcome.exit_codes.items() if code]
    return [
        (
            "reward",
            f"{_number(result.reward_first5)} → {_number(result.reward_last5)} "
            f"(mean of the first and of the last {AT_EACH_END} of {result.steps} steps)",
        ),
        (
            "tasks",
            f"dispatched {audit.dispatched} = accepted {audit.accepted} + abandoned "
            f"{abandoned} + outstanding {audit.outstanding}",
        ),
        (
            "audit",
            f"{audit.groups} groups of {audit.rows} rows, byte for byte; lost {audit.lost}, "
            f"doubled {audit.doubled}, out of order {audit.out_of_order}",
        ),
        ("processes", f"exit codes {', '.join(codes) or 'all 0'}; restarts: {restarts}"),
        ("took", f"{result.wall_s:.0f} s"),
        ("weights", str(config.weights_directory)),
        ("checkpoints", str(config.checkpoint_directory)),
        ("logs", str(config.log_directory)),
        ("metrics", str(config.metrics_path)),
        ("this, as JSON", written),
    ]


def what_to_try() -> list[str]:
    return [
        'make demo DEMO="seed=8 steps=200"              another seed, more steps',
        'make demo DEMO="grpo.async_grpo.enabled=false" synchronous GRPO over the same path',
        'make demo DEMO="assemblers=2"                  two assemblers share the partitions',
        "kill -9 any pid of <run directory>/pids.json while it runs: nothing is lost",
        "README.md: your own gym, model, dataset and Kafka cluster",
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
