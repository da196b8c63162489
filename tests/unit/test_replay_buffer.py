import pytest

from consumers.replay_buffer import FIRST_DELAY_S, MAX_DELAY_S, Answer, ReplayBuffer, next_delay_s
from schemas.records import Purpose


@pytest.mark.parametrize(
    ("target_step", "generation_version", "answer"),
    [
        (5, 5, Answer.ACCEPTED),
        (6, 5, Answer.ACCEPTED),  # one step ahead, which is the lead
        (7, 6, Answer.FULL),  # two steps ahead
        (6, 4, Answer.STALE),  # two versions behind its target
        (7, 5, Answer.STALE),  # stale stays stale: it never waits first
        (3, 9, Answer.ACCEPTED),  # newer than needed
    ],
)
def test_answers_at_version_5_with_lead_and_age_1(target_step, generation_version, answer):
    buffer = ReplayBuffer(lead=1, max_trajectory_age_steps=1, highest_version=5)
    assert buffer.offer(target_step, generation_version, Purpose.TRAIN) is answer


def test_synchronous_takes_the_current_version_alone():
    buffer = ReplayBuffer(lead=0, max_trajectory_age_steps=0, highest_version=2)
    assert buffer.offer(2, 2, Purpose.TRAIN) is Answer.ACCEPTED
    assert buffer.offer(3, 3, Purpose.TRAIN) is Answer.FULL
    assert buffer.offer(2, 1, Purpose.TRAIN) is Answer.STALE


def test_before_the_first_policy_only_the_lead_fits():
    buffer = ReplayBuffer(lead=1, max_trajectory_age_steps=1)
    assert buffer.offer(0, 0, Purpose.TRAIN) is Answer.ACCEPTED
    assert buffer.offer(1, 0, Purpose.TRAIN) is Answer.FULL


def test_validation_never_waits_and_is_never_stale():
    buffer = ReplayBuffer(lead=0, max_trajectory_age_steps=0, highest_version=0)
    assert buffer.offer(99, 99, Purpose.VALIDATION) is Answer.ACCEPTED
    assert buffer.offer(99, 0, Purpose.VALIDATION) is Answer.ACCEPTED


def test_the_highest_version_never_falls():
    buffer = ReplayBuffer(lead=0, max_trajectory_age_steps=0)
    buffer.announce(4)
    buffer.announce(2)
    assert buffer.highest_version == 4


def test_backoff_grows_by_half_to_half_a_second():
    delays = [FIRST_DELAY_S]
    while delays[-1] < MAX_DELAY_S:
        delays.append(next_delay_s(delays[-1]))
    assert delays[:3] == pytest.approx([0.010, 0.015, 0.0225])
    assert len(delays) == 11
    assert next_delay_s(delays[-1]) == MAX_DELAY_S == 0.5
