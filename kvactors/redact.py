"""Texts of objects that hold prompts or salts: sizes in place of contents, so that no log, error or
traceback has them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

HIDDEN = frozenset({"salt", "cache_salt"})
"""Fields of text that are not shown."""


def sized(name: str, value: Any) -> str:
    """A field's value: numbers, enums and plain text as they are, the size of everything else."""
    if value is None or isinstance(value, int | float | Enum):
        return repr(value)
    if isinstance(value, str):
        return f"<{len(value)} characters>" if name in HIDDEN else repr(value)
    if hasattr(value, "__struct_fields__") or hasattr(value, "_fields"):
        return redacted_repr(value)
    kind = type(value).__name__
    try:
        return f"<{kind} of {len(value)}>"
    except TypeError:
        return f"<{kind}>"


def fields_of(self: Any) -> Iterator[tuple[str, str]]:
    """Fields of a struct or a named tuple, by name."""
    names: tuple[str, ...] = getattr(self, "__struct_fields__", ()) or getattr(self, "_fields", ())
    for name in names:
        yield name, sized(name, getattr(self, name))


def redacted_repr(self: Any) -> str:
    """A `__repr__` for structs and named tuples."""
    return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in fields_of(self))})"


class Unquoted(str):
    """A text that is shown without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def redacted_rich_repr(self: Any) -> list[tuple[str, Any]]:
    """The same for Rich (`__rich_repr__`), which would show a struct's fields otherwise."""
    return [(name, Unquoted(text)) for name, text in fields_of(self)]
