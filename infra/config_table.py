"""The configuration as a page: `python -m infra.config_table > docs/configuration.md`."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config import Config

HEAD = """# Configuration

Every key of the YAML file, with its default. One file serves all roles; the same names work as
overrides on every command line: `grpo.max_num_steps=20`. `defaults: other.yaml` at the top of a
file puts another file below it. This page is made from `schemas/config.py`; a test compares them.

| key | default | what it is |
| --- | --- | --- |
"""


def page() -> str:
    rows = (f"| `{key}` | {default} | {text} |" for key, default, text in _rows(Config, ""))
    return HEAD + "\n".join(rows) + "\n"


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        key = prefix + name
        section, is_map = _section(field.annotation)
        if section is None or is_map:
            yield key, _default(field), field.description or ""
        if section is not None:
            yield from _rows(section, f"{key}.<name>." if is_map else f"{key}.")


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a key holds, and whether it holds several by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    sections = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return (sections[0], True) if sections else (None, False)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`"


if __name__ == "__main__":
    print(page(), end="")
