"""Every record round-trips, nothing else decodes, and other schema versions resolve."""

import copy
from io import BytesIO

import msgspec
import pytest
from fastavro import parse_schema, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from schemas import codec
from schemas.avro import fingerprint_of, schema_of
from schemas.codec import MARKER, PREFIX_BYTES, Codec
from schemas.errors import RecordUnreadable
from schemas.records import RECORD_TYPES, AssembledGroup, Finished, Record, RolloutRow

_LONG = st.integers(-(2**63), 2**63 - 1)
_INT = st.integers(-(2**31), 2**31 - 1)


def _values(schema, defined):
    """Any value that `schema` allows, as the record classes hold it."""
    if isinstance(schema, list):
        return st.one_of([_values(branch, defined) for branch in schema])
    if isinstance(schema, str):
        plain = {
            "null": st.none(),
            "boolean": st.booleans(),
            "int": _INT,
            "long": _LONG,
            "double": st.floats(allow_nan=False),
            "bytes": st.binary(max_size=20),
            "string": st.text(max_size=10),
        }
        return plain[schema] if schema in plain else defined[schema]
    match schema["type"]:
        case "array":
            return st.lists(_values(schema["items"], defined), max_size=3)
        case "map":
            return st.dictionaries(
                st.text(max_size=5), _values(schema["values"], defined), max_size=3
            )
        case "enum":
            result = st.sampled_from(schema["symbols"])
        case "fixed":
            result = st.binary(min_size=schema["size"], max_size=schema["size"])
        case "record":
            result = st.fixed_dictionaries(
                {f["name"]: _values(f["type"], defined) for f in schema["fields"]}
            )
        case _:
            return _values(schema["type"], defined)
    defined[schema["name"]] = result
    return result


def records(record_type: type[Record]):
    values = _values(schema_of(record_type.__name__), {})
    return values.map(lambda fields: msgspec.convert(fields, record_type))


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_class_and_schema_have_the_same_fields_and_each_is_documented(record_type):
    fields = schema_of(record_type.__name__)["fields"]
    assert [f["name"] for f in fields] == [f.name for f in msgspec.structs.fields(record_type)]
    assert all(f.get("doc") for f in fields)


@given(st.sampled_from(RECORD_TYPES).flatmap(records))
def test_anything_valid_round_trips(record):
    assert codec.decode(codec.encode(record)) == record


@given(records(RolloutRow), st.data())
def test_no_part_of_a_record_decodes(row, data):
    payload = codec.encode(row)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(RecordUnreadable):
        codec.decode(payload[:cut])
    with pytest.raises(RecordUnreadable):
        codec.decode(payload + b"\0")


@given(st.binary(max_size=200), st.sampled_from(RECORD_TYPES), st.booleans())
def test_hostile_bytes_are_a_record_or_unreadable(noise, record_type, prefixed):
    payload = (codec._CODEC.prefix_of(record_type) if prefixed else b"") + noise
    try:
        record = codec.decode(payload)
    except RecordUnreadable:
        return
    assert isinstance(record, record_type)


@given(records(AssembledGroup))
def test_a_concatenated_group_is_the_encoded_group(group):
    header = msgspec.structs.replace(group, rows=[])
    payloads = [codec.encode(row) for row in group.rows]
    assert codec.encode_group(header, payloads) == codec.encode(group)


def test_the_prefix_is_single_object_encoding():
    payload = codec.encode(Finished(step=1, at_ms=2))
    assert payload[:2] == MARKER == b"\xc3\x01"
    assert payload[2:PREFIX_BYTES] == fingerprint_of(schema_of("Finished"))
    assert payload[PREFIX_BYTES:] == bytes([2, 4])  # zig-zag longs


def _evolved(name, *, without=(), extra=None):
    schema = copy.deepcopy(schema_of(name))
    schema.pop("__fastavro_parsed__", None)
    schema["fields"] = [f for f in schema["fields"] if f["name"] not in without]
    if extra:
        schema["fields"].append(extra)
    return schema


def _payload(schema, fields):
    parsed, out = parse_schema(schema), BytesIO()
    schemaless_writer(out, parsed, fields)
    return MARKER + fingerprint_of(parsed) + out.getvalue()


@given(records(RolloutRow))
def test_an_old_row_is_read_with_the_defaults_of_the_new_fields(row):
    old = _evolved("RolloutRow", without=("timing", "full_result"))
    fields = msgspec.to_builtins(row, builtin_types=(bytes,))
    ours = Codec()
    ours.register(RolloutRow, old)
    read = ours.decode(_payload(old, fields))
    assert read == msgspec.structs.replace(row, timing=None, full_result=None)


@given(records(RolloutRow))
def test_a_newer_row_is_read_without_the_field_that_we_do_not_know(row):
    newer = _evolved("RolloutRow", extra={"name": "judge", "type": "string", "default": ""})
    fields = msgspec.to_builtins(row, builtin_types=(bytes,)) | {"judge": "x"}
    payload = _payload(newer, fields)
    with pytest.raises(RecordUnreadable, match="registered"):
        Codec().decode(payload)
    ours = Codec()
    ours.register(RolloutRow, newer)
    assert ours.decode(payload) == row


@given(records(AssembledGroup))
def test_rows_of_another_version_are_encoded_again_in_a_group(group):
    old = _evolved("RolloutRow", without=("full_result",))
    ours = Codec()
    ours.register(RolloutRow, old)
    payloads = [_payload(old, msgspec.to_builtins(r, builtin_types=(bytes,))) for r in group.rows]
    rows = [msgspec.structs.replace(r, full_result=None) for r in group.rows]
    expected = codec.encode(msgspec.structs.replace(group, rows=rows))
    assert ours.encode_group(msgspec.structs.replace(group, rows=[]), payloads) == expected


def test_a_record_of_another_class_is_named():
    with pytest.raises(RecordUnreadable, match="expected RolloutRow, found Finished"):
        codec.decode_as(codec.encode(Finished(step=1, at_ms=2)), RolloutRow)
