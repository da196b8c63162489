import orjson
import pytest

from producers.gyms.protocol import RolloutResult
from producers.row import RowOptions, attempt_failed, is_flagged, rollout_request, rollout_row
from schemas.errors import DatasetError
from schemas.records import FailedBy, Purpose
from schemas.validation import check_row
from tests.prompts import make_group
from tests.rows import make_manifest, make_started, make_trace

MANIFEST = make_manifest()
DEFAULT = RowOptions()


def result(**changes):
    fields = {"reward": 1, "traces": [make_trace("7-2")], "version_start": 3}
    return RolloutResult(**fields | changes)


def row_of(given, *, options=DEFAULT, timing=None, **changes):
    group = make_group(MANIFEST, 7, 1, target_step=5, rowidx_start=40, **changes)
    started = make_started(MANIFEST, 7, 1, shard="left", replica=2)
    return rollout_row(
        group, started, 2, "7-2-a1", given, timing=timing, produced_at_ms=99, options=options
    )


def test_a_row_carries_its_prompts_identity_and_who_executed_it():
    row = row_of(result(), purpose=Purpose.VALIDATION, replica=0)
    check_row(row)
    group = make_group(MANIFEST, 7, 1, target_step=5)
    assert (row.cohort, row.target_step, row.stamp) == ((7, 1), 5, group.stamp)
    assert row.purpose is Purpose.VALIDATION
    assert (row.row_index, row.rowidx, row.rollout_id) == (2, 42, "7-2-a1")
    assert (row.shard, row.replica, row.execution_id) == ("left", 2, "execution-7-1")
    assert (row.agent, row.version_start, row.produced_at_ms) == ("sums", 3, 99)
    assert (row.reward, row.timing, row.full_result) == (1.0, None, None)


def test_timing_is_copied():
    assert row_of(result(), timing={"run": 1.5}).timing == {"run": 1.5}


def test_the_full_result_needs_its_flag():
    given = result(full_result={"output": "2"})
    assert row_of(given).full_result is None
    kept = row_of(given, options=RowOptions(keep_full_result=True)).full_result
    assert orjson.loads(kept) == {"output": "2"}


@pytest.mark.parametrize(
    "full_result",
    [{"mask_sample": True}, {"instance_config": {"mask_sample": True}, "mask_sample": False}],
)
def test_a_flagged_result_is_masked_unless_flags_are_ignored(full_result):
    given = result(full_result=full_result)
    assert row_of(given).masked
    assert not row_of(given, options=RowOptions(mask_flagged=False)).masked


@pytest.mark.parametrize("full_result", [{}, {"mask_sample": False}, {"instance_config": None}])
def test_what_is_not_flagged(full_result):
    assert not is_flagged(full_result)


def test_one_row_is_repeated_and_each_rollout_has_its_own_copy():
    request = rollout_request(make_group(MANIFEST, 7, rows=[{"question": "1 + 1"}]))
    assert request.rows == [{"question": "1 + 1"}] * 4
    request.rows[0]["question"] = "changed"
    assert request.rows[1] == {"question": "1 + 1"}
    assert request.rollout_ids == ["7-0", "7-1", "7-2", "7-3"]


def test_supplied_rollout_ids_are_kept_and_carry_the_attempt():
    rows = [{"_ng_rollout_id": f"mine.{i}"} for i in range(4)]
    request = rollout_request(make_group(MANIFEST, 7, 2, rows=rows))
    assert request.rollout_ids == [f"mine.{i}-a2" for i in range(4)]


def test_an_id_supplied_with_a_repeated_row_names_no_rollout():
    request = rollout_request(make_group(MANIFEST, 7, rows=[{"_ng_rollout_id": "mine"}]))
    assert request.rollout_ids == ["7-0", "7-1", "7-2", "7-3"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [{}, {}]}, "2 dataset rows for a group of 4"),
        ({"rows": [{"_ng_rollout_id": "../x"}] * 4}, "_ng_rollout_id"),
        ({"rows": [{"_ng_rollout_id": 5}] * 4}, "_ng_rollout_id"),
        ({"rows": [{"_ng_rollout_id": "same"}] * 4}, "same in two rows"),
    ],
)
def test_a_bad_prompt_is_named(changes, words):
    with pytest.raises(DatasetError, match="task 7 attempt 0") as caught:
        rollout_request(make_group(MANIFEST, 7, **changes))
    assert words in str(caught.value)


@pytest.mark.parametrize("payload", [b"{", b"[1]", b'{"a": NaN}'])
def test_a_row_that_is_no_json_object_is_named(payload):
    group = make_group(MANIFEST, 7, rows=[])
    broken = type(group)(
        **{name: getattr(group, name) for name in group.__struct_fields__} | {"rows": [payload]}
    )
    with pytest.raises(DatasetError, match="task 7 attempt 0: a dataset row is"):
        rollout_request(broken)


def test_a_failed_attempt_is_the_shards_word():
    failed = attempt_failed(
        make_group(MANIFEST, 7, 1),
        execution_id=None,
        reason="deadline",
        failure_class="infra",
        message="late",
    )
    assert (failed.cohort, failed.by, failed.execution_id) == ((7, 1), FailedBy.SHARD, None)
