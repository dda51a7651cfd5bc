"""Finds every fault of a mapping of settings: unknown keys, missing ones, values of other types,
out of range or none of the choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from kvactors.errors import ConfigError
from kvactors.ranges import hints_of, unknown, value_fault
from kvactors.sink_config import CLASS_KIND

S = TypeVar("S", bound=msgspec.Struct)


def faults(data: Any, kind: Any, where: str = "") -> Iterator[str]:
    """The faults of settings.

    Args:
        data: the settings.
        kind: a struct, a union of tagged ones, or a tuple of either.
        where: the table's name.
    """
    kinds = list(structs_of(kind))
    if isinstance(data, Mapping):
        yield from _table_faults(data, kinds, where)
    elif get_origin(kind) is not tuple:
        yield f"{where or 'the settings'} must be a table, not {data!r:.80}"
    elif not isinstance(data, list | tuple):
        yield f"{where} must be a list of tables ([[{where}]]), not {data!r:.80}"
    else:
        for number, item in enumerate(data):
            place = f"{where}[{number}]" if len(data) > 1 else where
            yield from faults(item, get_args(kind)[0], place)


def structs_of(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs of a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in () if get_origin(kind) is dict else get_args(kind):
        yield from structs_of(inner)


def with_class_paths(data: Any, kind: Any) -> Any:
    """Data for `kind` with `with_class_path` applied to every table."""
    kinds = list(structs_of(kind))
    if isinstance(data, list | tuple):
        return [with_class_paths(item, kind) for item in data]
    if isinstance(data, Mapping):
        data = with_class_path(data, kinds)
    struct = struct_of(data, kinds) if isinstance(data, Mapping) else None
    if struct is None:
        return data
    hints = hints_of(struct)
    return {
        key: with_class_paths(value, hints[key]) if key in hints else value
        for key, value in data.items()
    }


def with_class_path(
    data: Mapping[str, Any], kinds: list[type[msgspec.Struct]]
) -> Mapping[str, Any]:
    """A table whose kind is `package.module:Class`, as the struct of a union that holds such a
    path. Other tables are returned as they are."""
    tags = {kind.__struct_config__.tag for kind in kinds}
    field = kinds[0].__struct_config__.tag_field if kinds else None
    kind = None if field is None else data.get(field)
    if CLASS_KIND not in tags or not isinstance(kind, str) or ":" not in kind:
        return data
    return {**data, str(field): CLASS_KIND, "class_path": kind}


def struct_of(
    data: Mapping[str, Any], kinds: list[type[msgspec.Struct]]
) -> type[msgspec.Struct] | None:
    """The struct of a union that the data's tag names, None if there is none."""
    if not kinds:
        return None
    tag = kinds[0].__struct_config__.tag_field
    if tag is None:
        return kinds[0]
    named = {kind.__struct_config__.tag: kind for kind in kinds}
    value = data.get(tag)
    return named.get(value) if isinstance(value, str) else None


def _table_faults(
    data: Mapping[str, Any], kinds: list[type[msgspec.Struct]], where: str
) -> Iterator[str]:
    struct = struct_of(data, kinds)
    tag = kinds[0].__struct_config__.tag_field
    if struct is None:
        tags = [str(kind.__struct_config__.tag) for kind in kinds]
        known = ["package.module:Class" if one == CLASS_KIND else one for one in tags]
        if tag is None or tag not in data:
            yield f"{where}.{tag} is missing: choose one of {', '.join(known)}"
        else:
            yield unknown(f"{where}.{tag}", str(data[tag]), known)
        return
    hints = hints_of(struct)
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key == tag:
            continue
        if key not in hints:
            yield _unknown_key(name, str(key), list(hints))
        elif any(structs_of(hints[key])):
            yield from faults(value, hints[key], name)
        elif fault := value_fault(name, value, hints[key]):
            yield fault
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in data:
            yield f"{where}.{field.name} is missing" if where else f"{field.name} is missing"


def _unknown_key(name: str, key: str, known: list[str]) -> str:
    return unknown("key", key, known).replace(repr(key), repr(name), 1)


def convert(data: Mapping[str, Any], kind: type[S]) -> S:
    """A mapping as a struct.

    Raises:
        ConfigError: names the first fault, with the choices or the range, or the nearest name.
    """
    data = with_class_paths(data, kind)
    check_keys(data, kind, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the text of a ConfigError with the place of the settings."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_keys(data: Any, kind: Any, where: str) -> None:
    """Raise ConfigError for the first fault of data for `kind` (a struct, a union of tagged ones,
    or a tuple of either)."""
    for fault in faults(data, kind, where):
        raise ConfigError(fault)
