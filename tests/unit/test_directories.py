"""Which directories go, and which never do."""

from pathlib import Path

from schemas.control import ControlState
from schemas.records import CheckpointRecorded, PolicyVersion
from trainer.directories import (
    KEPT_VERSIONS,
    Leftovers,
    Numbered,
    checkpoint_path,
    checkpoints_in,
    remove,
    superseded_checkpoints,
    superseded_weights,
    unfinished_in,
    weights_in,
    weights_path,
)


def numbered(*numbers: int) -> list[Numbered]:
    return [Numbered(number, Path(f"/x/{number}")) for number in numbers]


def test_the_newest_checkpoints_up_to_the_recorded_one_are_kept():
    found = numbered(0, 5, 10, 15)
    assert superseded_checkpoints(found, 15, 2) == [Path("/x/0"), Path("/x/5")]
    assert superseded_checkpoints(found, 15, 9) == []
    # 15 is a successor's: it neither goes nor takes the place of one of ours
    assert superseded_checkpoints(found, 10, 1) == [Path("/x/0"), Path("/x/5")]


def test_weights_go_when_enough_newer_ones_are_announced():
    assert superseded_weights(numbered(0, 1, 2), KEPT_VERSIONS) == [Path("/x/0")]
    assert superseded_weights(numbered(0, 1, 2), KEPT_VERSIONS - 1) == []


def test_names_are_found_again_and_foreign_ones_are_left(tmp_path):
    for name in ("notes", "step_x", ".hidden", "v12"):
        (tmp_path / name).mkdir()
    checkpoint_path(tmp_path, 10, "ab12").mkdir()
    checkpoint_path(tmp_path, 2, "ff00").mkdir()
    weights_path(tmp_path, 3, "ab12").mkdir()
    (tmp_path / ".step_000004-ab12.partial-ab12").mkdir()
    assert [each.number for each in checkpoints_in(tmp_path)] == [2, 10]
    assert [each.number for each in weights_in(tmp_path)] == [3]
    assert [path.name for path in unfinished_in(tmp_path)] == [".step_000004-ab12.partial-ab12"]
    assert checkpoints_in(tmp_path / "absent") == []


def test_removal_leaves_nothing_and_may_come_twice(tmp_path):
    path = checkpoint_path(tmp_path, 10, "ab12")
    path.mkdir()
    (path / "file").write_text("x")
    remove(path)
    remove(path)
    assert list(tmp_path.iterdir()) == []


def test_only_what_control_does_not_know_is_left_over():
    state = ControlState()
    state.apply(
        "checkpoint",
        CheckpointRecorded(
            step=10, directory="/c/10-b", offsets={}, next_task_index=0, recorded_at_ms=0
        ),
    )
    state.apply("policy", PolicyVersion(version=12, weights_dir="/w/12-b", published_at_ms=0))
    leftovers = Leftovers(
        unfinished=(Path("/c/.half"),),
        weights=(
            Numbered(11, Path("/w/11-a")),
            Numbered(12, Path("/w/12-a")),
            Numbered(12, Path("/w/12-b")),
            Numbered(13, Path("/w/13-a")),
        ),
        checkpoints=(
            Numbered(0, Path("/c/0-a")),
            Numbered(10, Path("/c/10-a")),
            Numbered(10, Path("/c/10-b")),
            Numbered(15, Path("/c/15-a")),
        ),
    )
    assert set(leftovers.unrecorded(state)) == {
        Path("/c/.half"),
        Path("/c/10-a"),
        Path("/c/15-a"),
        Path("/w/12-a"),
        Path("/w/13-a"),
    }
    everything = leftovers.unrecorded(ControlState())
    assert len(everything) == 9  # a run without records has nothing to keep
