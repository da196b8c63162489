"""Between the assembler and its teachers: takes answers, asks who has nothing to do, counts."""

import logging
from collections import defaultdict

from consumers.assembler import Assembler
from consumers.decisions import Decision
from consumers.teachers.pool import Teachers
from consumers.turn import Now

log = logging.getLogger(__name__)


class Attending:
    """`counters` of the heartbeat: teacher_groups, teacher_failures, teacher_logprob_s /<alias>."""

    def __init__(self, assembler: Assembler, teachers: Teachers) -> None:
        self.counters: dict[str, float] = defaultdict(float)
        self._assembler, self._teachers = assembler, teachers

    def turn(self, now: Now) -> list[Decision]:
        """Never waits. Raises what Teachers.answers() raises."""
        decisions: list[Decision] = []
        for request, logprobs, error, took_s in self._teachers.answers():
            self.counters[f"teacher_logprob_s/{request.teacher}"] += took_s
            if logprobs is None:
                log.warning("task %d: %s", request.task_index, error)
                self.counters[f"teacher_failures/{request.teacher}"] += 1
                decisions += self._assembler.teacher_failed(request.number, error, now)
            else:
                self.counters[f"teacher_groups/{request.teacher}"] += 1
                decisions += self._assembler.teacher_answered(request.number, logprobs, now)
        for alias in sorted(self._teachers.idle):
            request_of_idle = self._assembler.teacher_request(alias)
            if request_of_idle is not None:
                self._teachers.ask(request_of_idle)
        return decisions
