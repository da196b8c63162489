import pytest

from schemas.control import ControlState
from schemas.errors import RunStopped
from schemas.records import Fatal, Finished, LastTarget, PolicyVersion, TargetSize


def test_the_newest_value_of_each_key_stands():
    state = ControlState()
    for version in (0, 1, 3, 2):
        record = PolicyVersion(version=version, weights_dir=f"v{version}", published_at_ms=0)
        state.apply("policy", record)
    state.apply("target/4", TargetSize(target_step=4, groups=2))
    state.apply("last_target", LastTarget(target_step=4))
    state.apply("finished", Finished(step=5, at_ms=0))
    assert (state.policy.version, state.highest_version) == (2, 3)
    assert (state.targets, state.last_target, state.finished.step) == ({4: 2}, 4, 5)


def test_fatal_stops_until_it_is_taken_back():
    state = ControlState()
    state.apply("fatal", Fatal(role="dispatcher", message="3 tasks abandoned", at_ms=0))
    with pytest.raises(RunStopped, match="dispatcher: 3 tasks abandoned"):
        state.raise_if_fatal()
    state.apply("fatal", None)
    state.raise_if_fatal()
