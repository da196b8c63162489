"""One thread a teacher: requests go in, answers come out, and the caller never waits."""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import tenacity

from consumers.enrichment import TeacherRequest, logprobs_of
from consumers.teachers.teacher import Teacher, TeacherFailed
from schemas.records import TeacherLogprobs

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """`logprobs` of the whole group, or None and the `error` of the last try.

    `took_s` counts every try and the waits between them.
    """

    request: TeacherRequest
    logprobs: list[TeacherLogprobs] | None
    error: str
    took_s: float


class Teachers:
    """Each teacher answers one request at a time; another one works meanwhile."""

    def __init__(self, teachers: Mapping[str, Teacher], tries: Mapping[str, int]) -> None:
        self.idle = set(teachers)  # may be asked; that is all that ask() requires
        self._teachers = teachers
        self._tries = tries
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._requests = {alias: queue.SimpleQueue[TeacherRequest]() for alias in teachers}
        self._answers = queue.SimpleQueue[Answer]()
        for alias in teachers:  # daemons: one that hangs must not keep the process
            threading.Thread(
                target=self._serve, args=(alias,), name=f"teacher-{alias}", daemon=True
            ).start()

    def ask(self, request: TeacherRequest) -> None:
        self.idle.remove(request.teacher)
        self._requests[request.teacher].put(request)

    def answers(self) -> list[Answer]:
        """What has come since the last call.

        Raises ConfigError where a teacher can't start, and whatever else ended a teacher's thread.
        """
        if self._failure is not None:
            raise self._failure
        found = []
        while not self._answers.empty():
            answer = self._answers.get()
            self.idle.add(answer.request.teacher)
            found.append(answer)
        return found

    def close(self) -> None:
        self._closed.set()
        for teacher in self._teachers.values():
            teacher.close()

    def _serve(self, alias: str) -> None:
        teacher = self._teachers[alias]
        try:
            teacher.start()
            while not self._closed.is_set():
                request = self._requests[alias].get()
                self._answers.put(self._answered(teacher, request))
        except Exception as error:  # raised in answers(): its groups would wait for ever
            if not self._closed.is_set():
                self._failure = error

    def _answered(self, teacher: Teacher, request: TeacherRequest) -> Answer:
        began_s = time.monotonic()
        sequences = [sequence.token_ids for sequence in request.sequences]
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._tries[request.teacher])
            | tenacity.stop_when_event_set(self._closed),
            wait=tenacity.wait_exponential_jitter(FIRST_WAIT_S, LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(_may_pass),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        try:
            found = retrying(teacher.logprobs, sequences) if sequences else []
        except TeacherFailed as error:
            return Answer(request, None, str(error), time.monotonic() - began_s)
        logprobs = logprobs_of(request, found)
        return Answer(request, logprobs, "", time.monotonic() - began_s)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TeacherFailed) and error.may_pass
