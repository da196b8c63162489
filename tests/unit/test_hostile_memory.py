"""What a large attack must show of the assembler's memory."""

from tests.hostile.attack import GROWTH_BYTES, LARGE, LEAST_SAMPLES, memory_flaws


def test_level_memory_is_no_flaw():
    assert memory_flaws([1, *[GROWTH_BYTES + 1] * LEAST_SAMPLES], LARGE) == []


def test_growth_since_the_first_sample_is_one():
    memory = [0, *[GROWTH_BYTES + 1] * LEAST_SAMPLES, 0]
    assert memory_flaws(memory, LARGE) == ["memory grew by 96 MiB"]


def test_a_large_attack_needs_a_handful_of_samples():
    assert memory_flaws([1] * (LEAST_SAMPLES - 1), LARGE) == [
        "memory was seen 9 times only: whether it is level is not known"
    ]
    assert memory_flaws([1], LARGE - 1) == []
