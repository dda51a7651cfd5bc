"""Checks of single values: type, range and choices, as the annotations of settings have them."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from kvactors.errors import ConfigError
from kvactors.setting_types import SIZE_PATTERN

LONGEST = 4096
"""Characters in a text setting."""

SHOWN = 80
"""Characters of a wrong value in an error."""

NEAR = 0.5
"""Similarity of two names from which on one is suggested for the other."""

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@lru_cache
def hints_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields, with their ranges."""
    return get_type_hints(struct, include_extras=True)


def check_values(settings: msgspec.Struct, where: str = "") -> None:
    """Raise ConfigError for the first value of a struct, nested structs included, that has
    another type than its field or is out of range."""
    for name, value in fields_of(settings):
        full = f"{where}.{name}" if where else name
        if isinstance(value, msgspec.Struct):
            check_values(value, full)
        elif isinstance(value, tuple) and any(isinstance(item, msgspec.Struct) for item in value):
            for item in value:
                check_values(item, full)
        elif fault := value_fault(full, value, hints_of(type(settings))[name]):
            raise ConfigError(fault)


def fields_of(settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """A struct's fields and their values."""
    if not isinstance(settings, msgspec.Struct):
        raise ConfigError(f"a table of settings was expected, not {settings!r}")
    for name in settings.__struct_fields__:
        yield name, getattr(settings, name)


def value_fault(name: str, value: Any, hint: Any) -> str:
    """The fault of a setting's value, empty if there is none.

    Args:
        name: the setting, as `table.name`.
        value: its value.
        hint: its type.
    """
    # The text is checked before its type: an error about a choice would contain all of it.
    if isinstance(value, str) and (fault := _text_fault(name, value)):
        return fault
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return _mismatch(name, value, hint, error)
    return ""


def unknown(what: str, value: str, known: list[str]) -> str:
    """An error about a name that is not one of those known, with the nearest one."""
    near = difflib.get_close_matches(value, known, n=1, cutoff=NEAR)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value[:SHOWN]!r}{hint}" + (
        f" There are {', '.join(known)}" if near else f": there are {', '.join(known)}"
    )


def describe(hint: Any) -> str:
    """The values that a type allows."""
    parts = [part for part in _parts(hint) if part is not type(None)]
    metas = [meta for part in parts for meta in _metas(part)]
    if any(meta.pattern == SIZE_PATTERN for meta in metas):
        return 'a size: bytes, or a text such as "8 GiB"'
    return " or ".join(_describe(part) for part in parts)


def choices(hint: Any) -> tuple[str, ...]:
    """The choices of a type, none if it has other values too."""
    parts = [part for part in _parts(hint) if part is not type(None)]
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        return tuple(map(str, get_args(parts[0])))
    return ()


def bounds(hint: Any) -> str:
    """The range of a type, empty if it has none."""
    for part in _parts(hint):
        for meta in _metas(part):
            if meta.gt is not None:
                return f"above {meta.gt:g}, at most {_plain(meta.le)}"
            if meta.ge is not None:
                return f"{_plain(meta.ge)} to {_plain(meta.le)}"
    return ""


def _describe(part: Any) -> str:
    if get_origin(part) is Annotated:
        base = describe(get_args(part)[0])
        return f"{base}, {span}" if (span := bounds(part)) else base
    if get_origin(part) is Literal:
        return "one of " + ", ".join(map(str, get_args(part)))
    if get_origin(part) in (list, tuple):
        return f"a list, each {describe(get_args(part)[0])}"
    if (get_origin(part) or part) in (dict, Mapping) or _is_struct(part):
        return "a table"
    return NAMES.get(part, "any value")


def _is_struct(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, msgspec.Struct)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself. A range around a union belongs to each."""
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        if get_origin(inner) in (Union, types.UnionType):
            return tuple(Annotated[part, *metas] for part in get_args(inner))
    return (hint,)


def _metas(part: Any) -> tuple[msgspec.Meta, ...]:
    return tuple(m for m in getattr(part, "__metadata__", ()) if isinstance(m, msgspec.Meta))


def _mismatch(name: str, value: Any, hint: Any, error: Exception) -> str:
    """A value of another type, out of range, or none of the choices."""
    if (known := choices(hint)) and isinstance(value, str):
        return unknown(name, value, list(known))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not _in_range(value, hint):
        return _out_of_range(name, value, hint)
    shown = repr(value)[:SHOWN]
    text = describe(hint)
    is_collection = isinstance(value, Mapping) and "a table" in text
    if is_collection or (isinstance(value, list | tuple) and "a list" in text):
        return f"{name}: {error}, namely {shown}"  # one of its items
    if "any value" in text:
        return f"{name}: {error}, namely {shown}"
    return f"{name} must be {text}, not {shown}"


def _in_range(value: float, hint: Any) -> bool:
    for part in _parts(hint):
        for meta in _metas(part):
            if meta.gt is not None and not value > meta.gt:
                return False
            if meta.ge is not None and not value >= meta.ge:
                return False
            if meta.le is not None and not value <= meta.le:
                return False
    return True


def _out_of_range(name: str, value: float, hint: Any) -> str:
    meta = next(meta for part in _parts(hint) for meta in _metas(part))
    if meta.gt is not None and not value > meta.gt:
        text = f"above {_plain(meta.gt)}"
    elif meta.ge is not None and not value >= meta.ge:
        text = f"at least {_plain(meta.ge)}"
    else:
        text = f"at most {_plain(meta.le)}"
    return f"{name} must be {text}, not {value} (allowed: {bounds(hint)})"


def _plain(number: float | None) -> str:
    assert number is not None
    return f"{number:,.0f}".replace(",", "") if number == int(number) else f"{number:g}"


def _text_fault(name: str, value: str) -> str:
    if "\0" in value or len(value) > LONGEST:
        return (
            f"{name} must have no NUL character and at most {LONGEST} characters, not "
            f"{value[:40]!r}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{name} is no text: {error}"
    return ""
