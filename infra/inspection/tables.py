"""The same pictures for people."""

import time
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.inspection.history import Arrival, Attempt, History
from infra.inspection.letters import Letter, by_reason
from infra.inspection.record_view import group_view, hex_dump, record_view
from infra.inspection.stored import Stored, decoded
from infra.inspection.tasks import Standing, Sums, TaskLine
from schemas.records import AssembledGroup

NARROWEST = 160  # where the output is no terminal, nothing may be cut
MESSAGE_CHARS = 300  # --json has all of it


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=NARROWEST)


def letters_table(letters: Iterable[Letter]) -> Table:
    """The first two columns are what `dlq show` takes."""
    table = _table("partition", "offset", "reason", "origin", "record", "task", "attempt", "row")
    for name in ("bytes", "time", "resolution"):
        table.add_column(name)
    for each in letters:
        origin = each.origin
        table.add_row(
            str(each.place.partition),
            str(each.place.offset),
            escape(each.reason),
            f"{origin.partition}:{origin.offset}" if origin else "",
            each.record or "unreadable",
            _number(each.task),
            _number(each.attempt),
            _number(each.row),
            str(each.size_bytes),
            when(each.at_ms),
            _resolution(each),
        )
    return table


def reasons_line(letters: list[Letter]) -> str:
    reasons = " + ".join(f"{reason} {count}" for reason, count in by_reason(letters).items())
    return f"letters {len(letters)}{' = ' if reasons else ''}{reasons}"


def show_letter(out: Console, letter: Letter, stored: Stored) -> None:
    out.print(letters_table([letter]))
    for name, value in stored.headers.items():
        text = value.decode(errors="backslashreplace")
        out.print(f"{name}: {text}", markup=False, soft_wrap=True)
    record = decoded(stored.value)
    if record is not None:
        for name, field in record_view(record).items():
            out.print(f"{name}: {field}", markup=False, soft_wrap=True)
    elif stored.value is None:
        out.print("the record has no value")
    else:
        out.print(hex_dump(stored.value), markup=False)


def tasks_table(lines: Iterable[TaskLine]) -> Table:
    table = _table("task", "target", "attempt", "state", "rows", "agent", "shard", "since")
    for line in lines:
        table.add_row(
            str(line.task),
            _number(line.target_step),
            _number(line.attempt),
            escape(_state(line)),
            f"{'?' if line.rows is None else line.rows} of {line.group_size}",
            escape(line.agent),
            escape(f"{line.shard}/{line.replica}" if line.shard else ""),
            when(line.at_ms),
        )
    return table


def sums_line(sums: Sums) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sums.abandoned.items())
    abandoned = sum(sums.abandoned.values())
    return (
        f"dispatched {sums.dispatched} = accepted {sums.accepted} ({sums.trained} trained) + "
        f"abandoned {abandoned}{f' ({reasons})' if reasons else ''} + "
        f"outstanding {sums.outstanding}"
        + (f" + forgotten {sums.forgotten}" if sums.forgotten else "")
    )


def show_group(out: Console, line: TaskLine, group: AssembledGroup | None) -> None:
    out.print(tasks_table([line]))
    if group is None:
        gone = "; its group is deleted, with the checkpoints that needed it"
        sentence = what_became(line) + (gone if line.standing.is_accepted else "")
        out.print(sentence, markup=False, soft_wrap=True)
        return
    view = group_view(group)
    for name in ("execution_id", "generation_version"):
        out.print(f"{name}: {view[name]}", markup=False)
    for each in view["teacher_logprobs"]:
        out.print(
            f"teacher {each['teacher']}: row {each['row_index']}, {each['tokens']} tokens",
            markup=False,
        )
    names = ("row_index", "rollout_id", "reward", "reward_components", "masked", "truncated")
    more = ("failure_class", "turn_count", "tokens", "sampled_tokens", "generation_version")
    table = _table(*names, *more, "traces")
    for row in view["rows"]:
        cells = [escape(str(row[name])) for name in (*names, *more)]
        table.add_row(*cells, str(len(row["traces"])))
    out.print(table)


def what_became(line: TaskLine) -> str:
    """A sentence about the task, without its end."""
    told = f" ({line.message})" if line.message else ""
    match line.standing:
        case Standing.ACCEPTED | Standing.TRAINED:
            return "it was accepted"
        case Standing.ABANDONED:
            return f"it was abandoned: {line.reason}{told}"
        case Standing.FORGOTTEN:
            return "it has ended; the records that say how are deleted"
        case Standing.NOT_DISPATCHED:
            return "the run has not dispatched it"
    return _what_goes_on(line, told)


def _what_goes_on(line: TaskLine, told: str) -> str:
    match line.standing:
        case Standing.WAITING:
            return f"attempt {line.attempt} failed: {line.reason}{told}; the next one is due"
        case Standing.CANCELLING:
            return "the dispatcher gave it up; the assembler has not answered yet"
        case _:
            return f"it is {line.standing}: {line.rows} of {line.group_size} rows have arrived"


def show_history(out: Console, history: History) -> None:
    out.print(tasks_table([history.line]))
    for attempt in history.attempts:
        out.print(_attempt_line(attempt), markup=False, soft_wrap=True)
        out.print(_arrivals_table(attempt.arrivals))
    if history.nameless:
        out.print("records whose key names the task, and that do not decode")
        out.print(_arrivals_table(history.nameless))
    out.print(f"the task: {what_became(history.line)}", markup=False, soft_wrap=True)


def when(at_ms: int | None) -> str:
    """Local time, to the millisecond."""
    if at_ms is None or at_ms < 0:
        return ""
    seconds, rest = divmod(at_ms, 1000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{rest:03d}"


def _attempt_line(attempt: Attempt) -> str:
    told = ": ".join(part for part in (attempt.reason, attempt.message) if part)
    return (
        f"attempt {attempt.number}: {attempt.outcome}, {attempt.rows_placed} rows placed"
        + (f", {when(attempt.ended_at_ms)}" if attempt.ended_at_ms else "")
        + (f"; {told}" if told else "")
    )


def _arrivals_table(arrivals: Iterable[Arrival]) -> Table:
    table = _table("partition", "offset", "time", "record", "row", "execution", "bytes", "fate")
    table.add_column("why", overflow="fold")
    for each in arrivals:
        table.add_row(
            str(each.place.partition),
            str(each.place.offset),
            when(each.at_ms),
            each.record or "?",
            _number(each.row),
            escape(each.execution_id or ""),
            _number(each.size_bytes),
            each.fate.value.replace("_", " "),
            escape(_why(each)),
        )
    return table


def _why(arrival: Arrival) -> str:
    cut = "..." if len(arrival.why) > MESSAGE_CHARS else ""
    parts = [arrival.why[:MESSAGE_CHARS] + cut]
    if arrival.failed_attempt and arrival.letter is not None:
        parts.append("its attempt failed")
    if arrival.letter is not None:
        parts.append(f"dlq {arrival.letter.place.partition}:{arrival.letter.place.offset}")
        parts.append(_resolution(arrival.letter))
    return "; ".join(part for part in parts if part)


def _resolution(letter: Letter) -> str:
    if letter.mark is None:
        return ""
    copy = letter.mark.replayed_to
    return letter.mark.resolution.value + (f" to {copy.partition}:{copy.offset}" if copy else "")


def _state(line: TaskLine) -> str:
    return f"{line.standing}({line.reason})" if line.reason else line.standing.value


def _number(value: int | None) -> str:
    return "" if value is None or value < 0 else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
