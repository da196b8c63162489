"""Complete groups on their way to a teacher and back, before they are offered to the replay buffer.

Pure. A teacher has one request at a time: the first needed of its groups. Its answer belongs to
the cohort that asked, and is dropped if that one was settled, failed or moved away meanwhile.
"""

from collections.abc import Callable

from msgspec import Struct

from consumers.cohort import Cohort
from schemas.codec import decode_as
from schemas.records import Purpose, RolloutRow, TeacherLogprobs

TeacherOf = Callable[[str], str | None]


class Sequence(Struct, frozen=True):
    """One trace whose log-probabilities are wanted. `token_ids` is little-endian int32."""

    row_index: int
    trace_id: str
    token_ids: bytes


class TeacherRequest(Struct, frozen=True):
    """`number` is never used twice by one assembler."""

    number: int
    teacher: str
    task_index: int
    attempt: int
    sequences: list[Sequence]


def no_teacher(_: str) -> str | None:
    return None


class Enrichment:
    """`teacher_of` gives an agent's teacher by its alias; None: that agent has none."""

    def __init__(self, teacher_of: TeacherOf = no_teacher) -> None:
        self._teacher_of = teacher_of
        self._waiting: dict[tuple[int, int], Cohort] = {}
        self._asked: dict[int, Cohort] = {}
        self._numbers = 0

    def waiting(self) -> list[Cohort]:
        """Complete groups that have no answer yet."""
        return list(self._waiting.values())

    def lacks(self, cohort: Cohort) -> bool:
        """Its teacher has to answer before it may be offered. Validation is never trained."""
        return (
            cohort.teacher_logprobs is None
            and cohort.identity.purpose is not Purpose.VALIDATION
            and self._teacher_of(cohort.agent or "") is not None
        )

    def wait(self, cohort: Cohort) -> None:
        """It stands in line for its teacher, or goes on standing there."""
        self._waiting[cohort.key] = cohort

    def next_of(self, teacher: str) -> Cohort | None:
        """The first needed group that the teacher was not asked for."""
        asked = {id(cohort) for cohort in self._asked.values()}
        mine = (
            cohort
            for cohort in self._waiting.values()
            if self._teacher_of(cohort.agent or "") == teacher and id(cohort) not in asked
        )
        return min(mine, key=lambda cohort: cohort.rank, default=None)

    def ask(self, cohort: Cohort, teacher: str) -> TeacherRequest:
        """Only of a complete, resident cohort."""
        rows = [decode_as(payload, RolloutRow) for payload in cohort.payloads()]
        self._numbers += 1
        self._asked[self._numbers] = cohort
        return TeacherRequest(
            self._numbers,
            teacher,
            cohort.task_index,
            cohort.attempt,
            [Sequence(row.row_index, t.trace_id, t.token_ids) for row in rows for t in row.traces],
        )

    def answered(self, number: int) -> Cohort | None:
        """Whose request that was; None where its group does not want the answer any more."""
        cohort = self._asked.pop(number, None)
        if cohort is not None:
            self._waiting.pop(cohort.key, None)
        return cohort

    def forget(self, cohort: Cohort) -> None:
        """It settled, failed or moved to another assembler."""
        if self._waiting.get(cohort.key) is cohort:
            del self._waiting[cohort.key]
        for number in [n for n, asked in self._asked.items() if asked is cohort]:
            del self._asked[number]


def logprobs_of(request: TeacherRequest, answer: list[bytes]) -> list[TeacherLogprobs]:
    """`answer` has [tokens] float32 for each sequence of the request, in its order."""
    return [
        TeacherLogprobs(
            teacher=request.teacher,
            row_index=sequence.row_index,
            trace_id=sequence.trace_id,
            logprobs=logprobs,
        )
        for sequence, logprobs in zip(request.sequences, answer, strict=True)
    ]
