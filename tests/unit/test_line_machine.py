"""The whole line, any interleaving, any crash: each task ends once, each target is whole."""

import os
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from schemas.records import FailedBy
from tests.unit.line_model import Line, P

EXAMPLES = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 300
seeds = st.integers(0, 1 << 16)


class WholeLine(RuleBasedStateMachine):
    @initialize(prompts=st.integers(1, 14), taught=st.booleans())
    def begin(self, prompts: int, taught: bool) -> None:
        self.line = Line(prompts, taught=taught)

    @rule(dies=st.sampled_from(["", "", "", "before", "after"]))
    def dispatcher_turns(self, dies: str) -> None:
        self.line.dispatcher_turns(dies=dies)

    @rule(seed=seeds, count=st.integers(1, 24))
    def rows_are_done(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            self.line.row_is_done(chance)

    @rule(seed=seeds, by=st.sampled_from(FailedBy))
    def attempt_fails(self, seed: int, by: FailedBy) -> None:
        self.line.attempt_fails(random.Random(seed), by)

    @rule(counts=st.tuples(*[st.integers(0, 40)] * P), flushes=st.booleans(), dies=st.booleans())
    def assembler_works(self, counts: tuple[int, ...], flushes: bool, dies: bool) -> None:
        for number, count in enumerate(counts):
            self.line.assembler_reads(number, count)
        self.line.assembler_turns()
        self.line.teacher_is_done(fails=False)
        if flushes:
            self.line.assembler_flushes()
        if dies:
            self.line.assembler_restarts()

    @rule(fails=st.sampled_from([False, False, True]))
    def teacher_is_done(self, fails: bool) -> None:
        self.line.teacher_is_done(fails=fails)

    @rule()
    def trainer_turns(self) -> None:
        self.line.trainer_turns()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.line.now_s += seconds

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "line"):
            self.line.check()

    def teardown(self) -> None:
        if not hasattr(self, "line"):
            return
        self.line.drain()
        self.line.check()
        totals = self.line.planner.ledger.totals
        assert totals.dispatched == totals.accepted + sum(totals.abandoned.values())
        for commit in self.line.kafka.commits:
            assert commit is not None or totals.dispatched <= 1


TestWholeLine = WholeLine.TestCase
TestWholeLine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
