"""What is sent: good groups among random bytes, broken rows, lies about lengths. Seeded, pure."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from schemas.avro import fingerprint_of, schema_of
from schemas.codec import MARKER, PREFIX_BYTES, encode
from schemas.identity import key_of, partition_of
from schemas.records import RECORD_TYPES, Heartbeat, Manifest, PolicyVersion, Record
from tests.rows import (
    make_cancel,
    make_failed,
    make_manifest,
    make_row,
    make_rows,
    make_started,
    with_nan_logprob,
)

GOOD_EVERY = 100  # records; one of G rows
VICTIMS = 64  # tasks whose broken copies are sent; what becomes of them is the assembler's affair
LONGEST_NOISE = 2048
TOKENS = 16
PREFIXES = [MARKER + fingerprint_of(schema_of(each.__name__)) for each in RECORD_TYPES]


class Sent(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None


class Attack:
    """`good_tasks` must be accepted, byte for byte; nothing else is promised to be."""

    def __init__(self, manifest: Manifest, seed: int, records: int) -> None:
        self._manifest = manifest
        self._chance = random.Random(seed)
        self._records = records
        size = manifest.num_generations_per_prompt
        self.good_tasks = range(VICTIMS, VICTIMS + records // GOOD_EVERY // size)
        self._victims = [row for task in range(VICTIMS) for row in self.rows_of(task)]
        self._of_others = _records_of_others(manifest)
        self._kinds: list[Callable[[], bytes | None]] = [
            self._noise,
            self._noise_with_a_prefix,
            self._truncated,
            self._flipped,
            self._of_other_types,
            self._deep_json,
            self._huge_length,
            lambda: None,
            lambda: b"",
            lambda: with_nan_logprob(make_row(manifest, self._victim_task(), 0, tokens=TOKENS)),
        ]

    def rows_of(self, task: int) -> list[bytes]:
        return make_rows(self._manifest, task, tokens=TOKENS)

    def __iter__(self) -> Iterator[Sent]:
        """The rows of a good group come in their order, with hundreds of others between them."""
        partitions = self._manifest.num_partitions
        good = [(task, row) for task in self.good_tasks for row in self.rows_of(task)]
        for number in range(self._records):
            at, is_good = divmod(number, GOOD_EVERY)
            if is_good == 0 and at < len(good):
                task, row = good[at]
                yield Sent(partition_of(task, partitions), key_of(task), row)
            else:
                yield self._bad()

    def _bad(self) -> Sent:
        chance = self._chance
        key = chance.choice([None, b"", b"0", chance.randbytes(chance.randrange(64))])
        return Sent(
            chance.randrange(self._manifest.num_partitions), key, chance.choice(self._kinds)()
        )

    def _victim_task(self) -> int:
        return self._chance.randrange(VICTIMS)

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.randrange(LONGEST_NOISE))

    def _noise_with_a_prefix(self) -> bytes:
        return self._chance.choice(PREFIXES) + self._noise()

    def _truncated(self) -> bytes:
        row = self._chance.choice(self._victims)
        return row[: self._chance.randrange(len(row))]

    def _flipped(self) -> bytes:
        """One to eight bits; where only a token changes it is a valid row that differs."""
        row = bytearray(self._chance.choice(self._victims))
        for _ in range(self._chance.randint(1, 8)):
            row[self._chance.randrange(len(row))] ^= 1 << self._chance.randrange(8)
        return bytes(row)

    def _of_other_types(self) -> bytes:
        return self._chance.choice(self._of_others)

    def _deep_json(self) -> bytes:
        depth = self._chance.randrange(1, LONGEST_NOISE // 2)
        return b"[" * depth + b"]" * depth

    def _huge_length(self) -> bytes:
        """A length or a count of up to 2^62 in the middle of a row."""
        row = self._chance.choice(self._victims)
        at = self._chance.randrange(PREFIX_BYTES, len(row))
        return row[:at] + _varint(self._chance.randrange(1 << 62)) + row[at:]


def _records_of_others(manifest: Manifest) -> list[bytes]:
    """Valid records: of other topics, of another run, never dispatched, or far ahead."""
    records: list[Record] = [
        manifest,
        PolicyVersion(version=1, weights_dir="w", published_at_ms=1),
        Heartbeat(
            role="r",
            instance="i",
            incarnation="n",
            pid=1,
            host="h",
            at_ms=1,
            loop_at_ms=1,
            doing="d",
            doing_since_ms=1,
        ),
        make_row(make_manifest("another-run"), 0, 0),
        make_row(manifest, 1 << 40, 0),
        make_row(manifest, 0, 0, stamp=bytes(8)),
        make_row(manifest, 0, -1),
        make_row(manifest, 0, 1 << 20),
        make_started(manifest, 0, execution_id="another"),
        make_failed(manifest, 1),
        make_cancel(manifest, 2),
    ]
    return [encode(record) for record in records]


def _varint(value: int) -> bytes:
    """Avro's long: zigzag, seven bits a byte."""
    rest, parts = value << 1, bytearray()
    while rest > 0x7F:
        parts.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*parts, rest])
