import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.settlement import MAX_AHEAD, SettledSet
from schemas.errors import MetadataUnreadable, OrdinalTooFar


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())))
def test_is_a_plain_set_whatever_crashes(steps):
    settled, expected = SettledSet(), set()
    for seen, (ordinal, crashes) in enumerate(steps):
        if crashes:
            settled, restored = SettledSet.decode(settled.encode(seen) + "\0")  # the client's NUL
            assert restored == seen
        settled.add(ordinal)
        expected.add(ordinal)
    assert {ordinal for ordinal in range(41) if ordinal in settled} == expected
    assert settled.watermark == min(set(range(42)) - expected)


def test_the_largest_set_fits_a_commit():
    settled = SettledSet(watermark=2**40)
    settled.add(2**40 + MAX_AHEAD)
    assert len(settled.encode(2**60)) == 2756
    assert settled.end == 2**40 + MAX_AHEAD + 1


def test_one_more_is_too_far():
    with pytest.raises(OrdinalTooFar, match=f"16385 above watermark 0, limit {MAX_AHEAD}"):
        SettledSet().add(MAX_AHEAD + 1)


@pytest.mark.parametrize(
    "metadata",
    ["", "not base64!", "AAAA", base64.b64encode(b"\2" + bytes(16)).decode()],
    ids=["empty", "other letters", "short", "a later format"],
)
def test_unreadable_metadata_is_an_error_not_an_empty_set(metadata):
    with pytest.raises(MetadataUnreadable):
        SettledSet.decode(metadata)
