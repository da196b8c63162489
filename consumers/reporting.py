"""What the assembler's heartbeat says: in words what it waits for, in numbers what it did. Pure."""

from consumers.assembler import Assembler


def doing_of(assembler: Assembler, numbers: list[int]) -> str:
    if not numbers:
        return "waits for partitions: another assembler has them all, or is leaving"
    held, unread = len(assembler.buffered.held), len(assembler.buffered.unread)
    if unread:
        return f"reads rows of {unread} complete groups again: assembler_memory_bytes is short"
    if taught := len(assembler.enrichment.waiting()):
        return f"waits for teachers of {taught} complete groups; reads rows meanwhile"
    if held:
        return f"holds {held} complete groups for a newer policy; reads rows meanwhile"
    return f"waits for rows of partitions {numbers}"


def counters_of(assembler: Assembler, transactions: int) -> dict[str, float]:
    counts, waiting = assembler.counts, assembler.buffered.waiting()
    return {
        "rows": counts.rows,
        "rows_late": counts.rows_late,
        "rows_duplicate": counts.rows_duplicate,
        "dead_letters": counts.dead_letters,
        "groups_accepted": counts.groups_accepted,
        "groups_abandoned": counts.groups_abandoned,
        "attempts_failed": counts.attempts_failed,
        "groups_open": assembler.groups_open,
        "groups_held": len(waiting),
        "groups_with_teacher": len(assembler.enrichment.waiting()),
        "rows_held": sum(len(cohort.rows) for cohort in waiting),
        "buffered_bytes": assembler.buffered.used_bytes,
        "transactions": transactions,
        "partitions": len(assembler.partitions),
    }
