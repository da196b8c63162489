"""The window of targets and its uncovered slots."""

from producers.slots import uncovered, window


def test_the_window_reaches_lead_targets_ahead():
    assert list(window(3, 2, None)) == [3, 4, 5]
    assert list(window(3, 0, None)) == [3]


def test_the_window_ends_at_the_last_target():
    assert list(window(3, 2, 4)) == [3, 4]
    assert list(window(3, 2, 2)) == []


def test_uncovered_slots_come_lowest_target_first():
    covered = {5: 0b101, 7: 0b111}
    assert list(uncovered(range(5, 8), 3, covered)) == [(5, 1), (6, 0), (6, 1), (6, 2)]
