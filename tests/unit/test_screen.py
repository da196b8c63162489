"""The live screen: from recorded heartbeats and metrics to what is drawn."""

import io

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from infra.screen.facts import RunFacts, steps_of
from infra.screen.line import line_of
from infra.screen.panel import panel_of
from infra.screen.sparkline import BARS, sparkline
from infra.screen.view import Process, view_of
from schemas.control import ControlState
from schemas.records import Heartbeat, LastTarget, PolicyVersion

NOW_MS = 1_000_000


def heartbeat(role, instance="0", *, at_ms=NOW_MS, doing="working", incarnation="a", **counters):
    return Heartbeat(
        role=role,
        instance=instance,
        incarnation=incarnation,
        pid=1,
        host="h",
        at_ms=at_ms,
        loop_at_ms=at_ms,
        doing=doing,
        doing_since_ms=at_ms - 3000,
        counters=counters,
    )


def metrics_line(step, reward, **more):
    values = {
        "step": step,
        "tasks": [step],
        "reward_mean": reward,
        "reward": {"sums": reward} if reward is not None else {},
        "staleness": 1.0,
        "tokens_per_s": 500.0,
        "at_ms": step,
    }
    return orjson.dumps(values | more) + b"\n"


def facts_of(*heartbeats, lines=()):
    facts = RunFacts(steps=steps_of(lines))
    for one in heartbeats:
        facts.hear(one)
    return facts


def view(facts, processes=(), **more):
    values = {"run_id": "r", "total_steps": 10, "elapsed_s": 61.0, "now_ms": NOW_MS}
    return view_of(facts, processes, **(values | more))


def drawn(shown):
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(panel_of(shown))
    return console.file.getvalue()


def test_a_step_that_was_trained_again_counts_once():
    lines = [metrics_line(0, 0.1), metrics_line(1, 0.2), metrics_line(1, 0.3)]
    assert [step.reward_mean for step in steps_of(lines)] == [0.1, 0.3]


def test_a_half_written_line_waits():
    whole, torn = metrics_line(0, 0.1), metrics_line(1, 0.2)[:-5]
    assert len(steps_of([whole, torn])) == 1


def test_a_step_without_groups_has_no_reward():
    shown = view(facts_of(lines=[metrics_line(0, 0.5), metrics_line(1, None, staleness=None)]))
    assert shown.rewards == {"all": [0.5], "sums": [0.5]}
    assert shown.staleness is None
    assert "step" in drawn(shown)


def test_sums_over_processes_of_a_role():
    facts = facts_of(
        heartbeat("gym-shard", "a/0", rows_in_flight=3),
        heartbeat("gym-shard", "b/0", rows_in_flight=4),
        heartbeat("dispatcher", accepted=5, dispatched=9, abandoned=1),
    )
    shown = view(facts)
    assert (shown.rows_in_flight, shown.groups_accepted, shown.groups_dispatched) == (7, 5, 9)
    assert shown.groups_abandoned == 1


def test_generation_speed_is_over_the_last_heartbeats_of_one_incarnation():
    facts = facts_of(
        heartbeat("gym-shard", "a/0", at_ms=NOW_MS - 9000, incarnation="old", sampled_tokens=9e9),
        heartbeat("gym-shard", "a/0", at_ms=NOW_MS - 2000, sampled_tokens=100),
        heartbeat("gym-shard", "a/0", at_ms=NOW_MS, sampled_tokens=300),
    )
    assert view(facts).generated_tokens_per_s == pytest.approx(100.0)


def test_names_whom_the_trainer_waits_for():
    waits = "step 4: 2 of 4 groups, missing task 17 (shard sums/0, attempt 0, 3 s)"
    facts = facts_of(
        heartbeat("trainer", doing=waits), heartbeat("assembler", doing="waiting for rows")
    )
    assert view(facts).awaited == f"trainer 0: {waits} (3 s)"
    assert view(facts_of(heartbeat("trainer", doing="training"))).awaited == "nobody"


def test_a_silent_and_a_stalled_process_are_in_trouble():
    silent = heartbeat("trainer", at_ms=NOW_MS - 7000)
    process = Process("trainer", "trainer/0", "running")
    (line,) = view(facts_of(silent), [process]).roles
    assert line.troubled
    assert line.doing == "silent for 7 s"
    (line,) = view(facts_of(silent), [Process("trainer", "trainer/0", "exit code 0")]).roles
    assert not line.troubled


def test_who_has_not_begun_is_awaited_first():
    facts = facts_of(heartbeat("trainer", doing="waiting for groups"))
    processes = [
        Process("trainer", "trainer/0", "running"),
        Process("gym-shard-a-0", "gym-shard/a/0", "running"),
    ]
    assert view(facts, processes).awaited == "the start of gym-shard-a-0"


def test_a_restarted_process_is_starting_until_it_speaks():
    old = heartbeat("trainer", at_ms=NOW_MS - 9000, doing="training")
    restarted = Process("trainer", "trainer/0", "running", restarts=1, lived_s=3.0)
    shown = view(facts_of(old), [restarted])
    assert (shown.roles[0].doing, shown.roles[0].troubled) == ("starting", False)
    assert shown.awaited == "the start of trainer"


def test_progress_is_the_published_version_and_the_end_of_the_data_is_the_total():
    facts = facts_of(lines=[metrics_line(0, 0.1)])
    assert view(facts).step == 1
    state = ControlState()
    state.apply("policy", PolicyVersion(version=3, weights_dir="w", published_at_ms=1))
    state.apply("last_target", LastTarget(target_step=6))
    facts.control = state
    shown = view(facts)
    assert (shown.step, shown.total_steps) == (3, 7)


def test_the_panel_and_the_line_show_what_matters():
    lines = [metrics_line(step, step / 10) for step in range(10)]
    facts = facts_of(heartbeat("dispatcher", accepted=40, dispatched=44), lines=lines)
    shown = view(
        facts, [Process("dispatcher", "dispatcher/0", "running", 2)], notice="it was killed"
    )
    text = drawn(shown)
    for expected in ("step 10 / 10", "sums", "0.20", "0.70", "40 accepted of 44", "1.0 versions"):
        assert expected in text
    assert "restarts: 2" in text
    assert "it was killed" in text
    assert "▇" in text
    line = line_of(shown)
    assert "\n" not in line
    for expected in ("step 10/10", "reward all 0.90 sums 0.90", "groups 40/44", "awaited: nobody"):
        assert expected in line


def test_nothing_is_known_at_the_beginning():
    shown = view(facts_of(), [Process("trainer", "trainer/0", "running")])
    assert "no step is trained yet" in drawn(shown)
    assert "step 0/10" in line_of(shown)


def test_the_line_names_who_restarts():
    shown = view(facts_of(), [Process("trainer", "trainer/0", "restarting in 2 s")])
    assert "trainer restarting in 2 s" in line_of(shown)


def test_bars_follow_the_values():
    assert sparkline([0, 0.5, 1], 10, 0, 1) == "▁▅█"
    assert sparkline([0, 1, 0, 1], 2, 0, 1) == "▅▅"
    assert sparkline([5, -5], 10, 0, 1) == "█▁"
    assert sparkline([], 10, 0, 1) == ""
    assert sparkline([3, 3], 10, 3, 3) == "▁▁"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 60))
def test_bars_fit_their_width(values, width):
    bars = sparkline(values, width, min(values), max(values))
    assert len(bars) == min(width, len(values))
    assert set(bars) <= set(BARS)
