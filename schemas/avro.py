"""The Avro schemas beside this file, parsed, with their CRC-64-AVRO fingerprints."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import orjson
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

NAMESPACE = "groupstream"
_DIRECTORY = Path(__file__).parent

Schema = dict[str, Any]


@cache
def schema_of(name: str) -> Schema:
    """The parsed schema of record `name`, with the records that it refers to inside."""
    return parsed(_inlined(_load(name), set()))


def parsed(schema: Schema) -> Schema:
    return cast(Schema, parse_schema(schema))


def fingerprint_of(schema: Schema) -> bytes:
    """8 bytes, little-endian CRC-64-AVRO of the parsing canonical form (Avro specification)."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


def _load(name: str) -> Schema:
    return cast(Schema, orjson.loads((_DIRECTORY / f"{name}.avsc").read_bytes()))


def _inlined(node: Any, defined: set[str]) -> Any:
    """Each named type defined where it is first used and named after that, as Avro demands."""
    if isinstance(node, list):
        return [_inlined(item, defined) for item in node]
    if isinstance(node, str) and node not in defined and (_DIRECTORY / f"{node}.avsc").exists():
        return _inlined(_load(node), defined)
    if not isinstance(node, dict):
        return node
    if node.get("type") in ("record", "enum", "fixed"):
        if node["name"] in defined:
            return node["name"]
        defined.add(node["name"])
    return {
        key: _inlined(value, defined) if key in ("fields", "type", "items", "values") else value
        for key, value in node.items()
    }
