"""Teachers behind a server: what is asked, which failures are tried again, who waits for whom."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from consumers.enrichment import Sequence, TeacherRequest
from consumers.teachers.endpoint import EndpointTeacher
from consumers.teachers.frames import PipeClosed, PipeSilent, read_frame, write_frame
from consumers.teachers.pool import Answer, Teachers
from consumers.teachers.teacher import TeacherFailed, as_bytes
from schemas.config import TeacherConfig
from schemas.errors import ConfigError
from schemas.vectors import logprobs, token_bytes
from tests.teacher_server import Reply, echoed, logprob_of, teacher_server

WAIT_S = 20.0


def endpoint(base_url: str, **more: Any) -> EndpointTeacher:
    fields = {"model_name": "big", "base_url": base_url, "timeout_s": 5.0}
    return EndpointTeacher(TeacherConfig.model_validate(fields | more))


def test_the_prompt_is_echoed_with_its_logprobs() -> None:
    asked: list[dict[str, Any]] = []

    def answering(request: dict[str, Any]) -> Reply:
        asked.append(request)
        return echoed(request)

    with teacher_server(answering) as base_url:
        first, second = endpoint(base_url).logprobs([token_bytes([5, 6, 7]), token_bytes([9])])
    assert logprobs(first).tolist() == [0.0, logprob_of(6), logprob_of(7)]
    assert logprobs(second).tolist() == [0.0]
    (request,) = asked
    assert request["path"] == "/v1/completions"
    assert request["prompt"] == [[5, 6, 7], [9]]
    assert (request["model"], request["echo"], request["max_tokens"]) == ("big", True, 0)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def answering(request: dict[str, Any]) -> Reply:
        seen.append(request["authorization"])
        return echoed(request)

    with teacher_server(answering) as base_url:
        with pytest.raises(ConfigError, match=r"A_KEY of http.* is not set"):
            endpoint(base_url, api_key_env="A_KEY")
        monkeypatch.setenv("A_KEY", "secret")
        endpoint(base_url, api_key_env="A_KEY").logprobs([token_bytes([1])])
    assert seen == ["Bearer secret"]


@pytest.mark.parametrize(
    ("reply", "message", "may_pass"),
    [
        ((500, {}), "answered 500", True),
        ((429, {}), "answered 429", True),
        ((400, {"error": "too long"}), "answered 400.*too long", False),
        ((200, {}), "gave no choices", False),
        ((200, {"choices": []}), "0 choices for 1 prompts", False),
        ((200, {"choices": [{"index": 0}]}), "must support echo", False),
        (
            (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, "x", 1]}}]}),
            "must support echo",
            False,
        ),
        (
            (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None]}}]}),
            "1 log-probabilities came for 3 tokens",
            False,
        ),
        (
            (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, -1, None]}}]}),
            "token 2 of 3 is nan",
            False,
        ),
    ],
)
def test_failures_say_whether_another_try_helps(reply: Reply, message: str, may_pass: bool) -> None:
    with (
        teacher_server(lambda _: reply) as base_url,
        pytest.raises(TeacherFailed, match=message) as failed,
    ):
        endpoint(base_url).logprobs([token_bytes([1, 2, 3])])
    assert failed.value.may_pass is may_pass


def test_a_server_that_is_away_or_hangs_may_come_back() -> None:
    with teacher_server() as gone:
        pass
    with pytest.raises(TeacherFailed, match="ConnectError") as away:
        endpoint(gone).logprobs([token_bytes([1])])
    assert away.value.may_pass
    release = threading.Event()

    def hanging(request: dict[str, Any]) -> Reply:
        release.wait(WAIT_S)
        return echoed(request)

    with teacher_server(hanging) as base_url:
        with pytest.raises(TeacherFailed, match="ReadTimeout") as hung:
            endpoint(base_url, timeout_s=0.2).logprobs([token_bytes([1])])
        release.set()
    assert hung.value.may_pass


def test_a_teacher_gives_finite_numbers() -> None:
    assert np.frombuffer(as_bytes([None, -0.5], 2), dtype="<f4").tolist() == [0.0, -0.5]
    with pytest.raises(TeacherFailed, match="is -inf"):
        as_bytes([None, float("-inf")], 2)


class Scripted:
    """A teacher that does what its script says, call by call."""

    def __init__(self, *script: Callable[[], None]) -> None:
        self.calls = 0
        self.is_closed = False
        self._script = script

    def start(self) -> None:
        """Always can."""

    def logprobs(self, sequences: list[bytes]) -> list[bytes]:
        act = self._script[min(self.calls, len(self._script) - 1)]
        self.calls += 1
        act()
        return [bytes(len(sequence)) for sequence in sequences]

    def close(self) -> None:
        self.is_closed = True


def answers() -> None:
    """At once."""


def fails(*, may_pass: bool) -> Callable[[], None]:
    def act() -> None:
        raise TeacherFailed("busy", may_pass=may_pass)

    return act


def request(number: int, teacher: str) -> TeacherRequest:
    sequences = [Sequence(row, "t", token_bytes([1, 2])) for row in range(2)]
    return TeacherRequest(number, teacher, 7, 0, sequences)


def wait_for_answer(teachers: Teachers) -> Answer:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := teachers.answers():
            (answer,) = found
            return answer
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_one_request_a_teacher_and_nobody_waits_for_another_one() -> None:
    release = threading.Event()
    slow, quick = Scripted(lambda: release.wait(WAIT_S) and None), Scripted(answers)
    teachers = Teachers({"slow": slow, "quick": quick}, {"slow": 1, "quick": 1})
    teachers.ask(request(1, "slow"))
    for number in range(2, 5):
        teachers.ask(request(number, "quick"))
        assert teachers.idle == set()
        answer = wait_for_answer(teachers)
        assert answer.request.number == number
        assert answer.logprobs is not None
        assert [found.row_index for found in answer.logprobs] == [0, 1]
    assert teachers.idle == {"quick"}
    release.set()
    assert wait_for_answer(teachers).request.number == 1
    teachers.close()
    assert slow.is_closed
    assert quick.is_closed


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    passing, stuck = Scripted(fails(may_pass=True), answers), Scripted(fails(may_pass=True))
    refused = Scripted(fails(may_pass=False), answers)
    teachers = Teachers(
        {"passing": passing, "stuck": stuck, "refused": refused},
        {"passing": 2, "stuck": 2, "refused": 2},
    )
    found = {}
    for name in ("passing", "stuck", "refused"):
        teachers.ask(request(1, name))
        found[name] = wait_for_answer(teachers)
    assert found["passing"].logprobs is not None
    assert (found["stuck"].logprobs, found["stuck"].error, stuck.calls) == (None, "busy", 2)
    assert (found["refused"].logprobs, refused.calls) == (None, 1)
    assert found["passing"].took_s > found["refused"].took_s
    teachers.close()


def test_a_teacher_that_cannot_start_is_told_to_the_loop() -> None:
    class Broken(Scripted):
        def start(self) -> None:
            raise ConfigError("no such model")

    teachers = Teachers({"broken": Broken(answers)}, {"broken": 1})
    with pytest.raises(ConfigError, match="no such model"):
        wait_for_answer(teachers)


def test_an_error_that_nobody_expected_is_told_to_the_loop_too() -> None:
    def breaks() -> None:
        raise RuntimeError("a bug")

    teachers = Teachers({"broken": Scripted(breaks)}, {"broken": 1})
    teachers.ask(request(1, "broken"))
    with pytest.raises(RuntimeError, match="a bug"):
        wait_for_answer(teachers)


def test_a_server_that_trickles_hangs_too() -> None:
    with teacher_server(trickles_s=0.05) as base_url:
        teacher = endpoint(base_url, timeout_s=0.3)
        with pytest.raises(TeacherFailed, match="no end within"):
            teacher.logprobs([token_bytes(range(500))])


def test_who_takes_nothing_is_silent() -> None:
    near, far = os.pipe()
    with pytest.raises(PipeSilent):
        write_frame(far, bytes(1_000_000), 0.05)
    os.close(near)
    os.close(far)


def test_frames_go_through_a_pipe_in_pieces() -> None:
    near, far = os.pipe()
    large = [os.urandom(3_000_000), b""]
    writer = threading.Thread(target=write_frame, args=(far, large))
    writer.start()
    assert read_frame(near, WAIT_S) == large
    writer.join()
    with pytest.raises(PipeSilent):
        read_frame(near, 0.05)
    os.write(far, b"\x08\0")
    os.close(far)
    with pytest.raises(PipeClosed):
        read_frame(near, WAIT_S)
    os.close(near)
