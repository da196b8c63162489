"""Records to bytes and back: Avro single-object encoding, `C3 01`, fingerprint, body.

A record written under another version of its schema is resolved to ours by Avro's rules, once
`Codec.register` was given that version. Everything that is not a whole record raises.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import TypeVar

import msgspec
from fastavro import schemaless_reader, schemaless_writer

from schemas.avro import Schema, fingerprint_of, parsed, schema_of
from schemas.errors import RecordUnreadable
from schemas.records import RECORD_TYPES, AssembledGroup, Record, RolloutRow

MARKER = b"\xc3\x01"
PREFIX_BYTES = len(MARKER) + 8

AnyRecord = TypeVar("AnyRecord", bound=Record)


class Codec:
    """Knows the schema that it writes for each record class, and every schema that it can read."""

    def __init__(self, record_types: Sequence[type[Record]] = RECORD_TYPES) -> None:
        self._writers: dict[type[Record], tuple[bytes, Schema]] = {}
        self._readers: dict[bytes, tuple[type[Record], Schema]] = {}
        for record_type in record_types:
            schema = schema_of(record_type.__name__)
            prefix = MARKER + fingerprint_of(schema)
            self._writers[record_type] = prefix, schema
            self._readers[prefix] = record_type, schema

    def register(self, record_type: type[Record], writer_schema: Schema) -> None:
        """Reads records that another version of `record_type` wrote."""
        schema = parsed(writer_schema)
        self._readers.setdefault(MARKER + fingerprint_of(schema), (record_type, schema))

    def prefix_of(self, record_type: type[Record]) -> bytes:
        return self._writers[record_type][0]

    def encode(self, record: Record) -> bytes:
        """Raises ValueError or TypeError where a field does not fit the schema."""
        prefix, schema = self._writers[type(record)]
        out = BytesIO()
        out.write(prefix)
        schemaless_writer(out, schema, msgspec.to_builtins(record, builtin_types=(bytes,)))
        return out.getvalue()

    def decode(self, payload: bytes) -> Record:
        """Raises RecordUnreadable (`unknown_schema` or `malformed`)."""
        known = self._readers.get(payload[:PREFIX_BYTES])
        if known is None:
            raise RecordUnreadable(
                "unknown_schema",
                f"no record starts with {payload[:PREFIX_BYTES].hex() or 'nothing'}: another "
                "program wrote it, or a newer groupstream, whose schema must be registered first",
            )
        record_type, writer = known
        stream = BytesIO(payload)
        stream.seek(PREFIX_BYTES)
        try:
            fields = schemaless_reader(stream, writer, self._writers[record_type][1])
            record = msgspec.convert(fields, record_type)
        except Exception as error:  # hostile bytes raise whatever the parser runs into
            raise RecordUnreadable(
                "malformed",
                f"{record_type.__name__} of {len(payload)} bytes does not decode: "
                f"{type(error).__name__}: {error}",
            ) from error
        if stream.tell() != len(payload):
            raise RecordUnreadable(
                "malformed",
                f"{record_type.__name__} ends at byte {stream.tell()} of {len(payload)}",
            )
        return record

    def decode_as(self, payload: bytes, record_type: type[AnyRecord]) -> AnyRecord:
        """Raises RecordUnreadable, also (`unexpected_record`) for a record of another class."""
        record = self.decode(payload)
        if not isinstance(record, record_type):
            raise RecordUnreadable(
                "unexpected_record",
                f"expected {record_type.__name__}, found {type(record).__name__}",
            )
        return record

    def encode_group(self, header: AssembledGroup, row_payloads: Sequence[bytes]) -> bytes:
        """`header` (without rows) followed by rows that are already encoded, as they came.

        Byte-identical to encoding the whole group. Rows of another schema version are decoded
        and encoded again; RecordUnreadable where that fails.
        """
        prefix = self.prefix_of(RolloutRow)
        empty = self.encode(header)
        if header.rows or empty[-1] != 0:
            raise ValueError("the header of a group carries no rows")
        parts: list[bytes | memoryview] = [empty[:-1]]
        if row_payloads:
            parts.append(_long(len(row_payloads)))
        for payload in row_payloads:
            ours = payload
            if not payload.startswith(prefix):
                ours = self.encode(self.decode_as(payload, RolloutRow))
            parts.append(memoryview(ours)[PREFIX_BYTES:])
        parts.append(b"\0")
        return b"".join(parts)


def _long(value: int) -> bytes:
    """Avro's zig-zag variable-length long, for a value that is not negative."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_CODEC = Codec()
encode = _CODEC.encode
decode = _CODEC.decode
decode_as = _CODEC.decode_as
encode_group = _CODEC.encode_group
register = _CODEC.register


def row_payloads(group: AssembledGroup) -> list[bytes]:
    """Each row of a decoded group as its own payload again."""
    return [encode(row) for row in group.rows]
