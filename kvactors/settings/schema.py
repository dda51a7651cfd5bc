"""Descriptions of the settings, from their docstrings, and the JSON schema that has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import docstring_parser
import msgspec

from kvactors.settings import Config
from kvactors.settings.check import settings_of
from kvactors.settings.sinks import ClassSinkConfig

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

CLASS_PATTERN = "^[^:]+:[^:]+$"  # a class of another package, as `kind` of a sink


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The description of each field of a table, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if issubclass(owner, msgspec.Struct):
            found |= entries_of(owner)
    return {name: found.get(name, "") for name in struct.__struct_fields__}


def summary(struct: type) -> str:
    """The paragraphs of a docstring before its sections, each on one line."""
    text = _parsed(struct).description or ""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def entries_of(struct: type) -> dict[str, str]:
    """The entries of the section Attributes of a docstring, by name."""
    return {
        name: " ".join((entry.description or "").split())
        for entry in _parsed(struct).params
        for name in entry.arg_name.split(", ")
    }


def _parsed(struct: type) -> docstring_parser.Docstring:
    return docstring_parser.parse(struct.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)


def json_schema(file: type[Config] = Config, title: str = "Settings of kvactors") -> dict[str, Any]:
    """The JSON schema of a file of settings, or of a larger kind of file, with the descriptions."""
    schema = msgspec.json.schema(file)
    for struct in tables_of(file):
        table = schema["$defs"][struct.__name__]
        table["description"] = summary(struct)
        docs = field_docs(struct)
        for name, prop in table["properties"].items():
            if docs.get(name):
                prop["description"] = docs[name]
    kind = schema["$defs"][ClassSinkConfig.__name__]["properties"]["kind"]
    kind["anyOf"] = [{"enum": kind.pop("enum")}, {"type": "string", "pattern": CLASS_PATTERN}]
    return {"$schema": SCHEMA_DIALECT, "title": title, **schema}


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs_in(inner)


def tables_of(file: type[Config]) -> list[type[msgspec.Struct]]:
    """The structs of a kind of file."""
    found: dict[type[msgspec.Struct], None] = {file: None}
    waiting: list[type[msgspec.Struct]] = [file]
    while waiting:
        for setting in settings_of(waiting.pop()).values():
            for struct in _structs_in(setting.hint):
                if struct not in found:
                    found[struct] = None
                    waiting.append(struct)
    return list(found)
