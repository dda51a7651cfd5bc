"""Types of settings with their ranges. `ranges` enforces them, the JSON schema and the reference of
the settings show them."""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvactors.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
"""At least one: blocks, ranks, heads."""

Number = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A count that may be zero, or a number that counts from zero."""

Several = Annotated[int, Meta(ge=2, le=1 << 31)]
BlockTokens = Annotated[int, Meta(ge=1, le=1 << 14)]
"""Tokens a block. Engines use up to about 2,000, and the index prepares memory by blocks."""

SmallCount = Annotated[int, Meta(ge=1, le=1 << 20)]
SmallNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Dimension = Annotated[int, Meta(ge=1, le=1 << 16)]
LayerCount = Annotated[int, Meta(ge=0, le=1 << 16)]
RankCount = Annotated[int, Meta(ge=1, le=1 << 10)]
DeviceNumber = Annotated[int, Meta(ge=0, le=1023)]
Threads = Annotated[int, Meta(ge=1, le=256)]
CopyThreads = Annotated[int, Meta(ge=1, le=64)]  # of one `CopyWorker`
Depth = Annotated[int, Meta(ge=1, le=1024)]
ObjectCount = Annotated[int, Meta(ge=0, le=1 << 40)]
MOST_BYTES = 1 << 50
"""1 PiB."""

ByteCount = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A time limit or an interval, which may not be zero."""

SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Multiple = Annotated[float, Meta(ge=1, le=1 << 10)]

SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[iI]?[bB]?\s*$"

BlockSize = Count | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Blocks, or bytes as a text with a unit such as "8 GiB" (see `sizes`)."""

ByteSize = ByteCount | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Bytes, or a text such as "8 GiB" (see `sizes`)."""

WritePolicy = Literal["none", "write_through", "write_through_selective", "write_back"]


# -- Sizes in bytes, or in blocks and bytes: a number, or a text with a unit. k, M, G and T are
# powers of 1024, with or without an i: "8 GB", "8 GiB" and "8g" are the same size.


UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def in_bytes(size: int | str, name: str) -> int:
    """A size in bytes.

    Args:
        size: bytes, or a text such as "512 MiB".
        name: the setting, for the error.

    Raises:
        ConfigError: it is neither.
    """
    match = re.match(SIZE_PATTERN, size) if isinstance(size, str) else None
    found: float = -1
    if match is not None:
        found = float(match[1]) * UNITS[match[2].lower()]
    elif isinstance(size, int) and not isinstance(size, bool):
        found = size
    if found > MOST_BYTES:
        raise ConfigError(f"{name} must be at most {human(MOST_BYTES)}, not {size}")
    if found >= 0:
        return int(found)
    raise ConfigError(f"{name} must be a size in bytes, or such as 512MB, not {size!r}")


def in_blocks(size: int | str, name: str, block_bytes: int | None) -> int:
    """A size in blocks: a number is one of blocks, a text with a unit one of bytes.

    Args:
        size: blocks such as 4096 or "4096", or bytes such as "8 GiB".
        name: the setting, for the error.
        block_bytes: bytes of a block, None if not known.

    Raises:
        ConfigError: it is neither, holds no block, or is in bytes and `block_bytes` is None.
    """
    if isinstance(size, int) or (re.fullmatch(r"\s*-?[0-9]{1,18}\s*", size)):
        blocks = int(size)
        if blocks < 1:
            raise ConfigError(f"{name} must be at least one block, not {blocks}")
        return blocks
    found = in_bytes(size, name)
    if block_bytes is None:
        raise ConfigError(f"{name} {size!r} is in bytes, and the bytes of a block are not known")
    if found < block_bytes:
        raise ConfigError(f"{name} is {human(found)}, and one block takes {human(block_bytes)}")
    return found // block_bytes


def human(size: float) -> str:
    """A size as a text that `in_bytes` reads, with at most two decimals."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size:.0f} B"


# -- Reads files of settings: their size and their nesting are bounded.


SETTINGS_BYTES = 16 << 20
"""Bytes of a file of settings at most."""

MAX_NESTING = 32
"""Tables and lists inside one another in a file, at most."""


def read_settings(path: str | Path) -> bytes:
    """The contents of a file of settings, or of a device or a pipe in its place.

    Raises:
        ConfigError: it has more than SETTINGS_BYTES.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(SETTINGS_BYTES + 1)
    if len(data) > SETTINGS_BYTES:
        raise ConfigError(f"{path} has more than {SETTINGS_BYTES >> 20} MiB: it holds no settings")
    return data


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as a mapping.

    Raises:
        ConfigError: it is too large or too deep, or not TOML in UTF-8.
        OSError: it cannot be read.
    """
    raw = read_settings(path)
    try:
        data = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of 5,000 digits
        raise ConfigError(f"{path}: {error}") from error
    level: list[Any] = [data]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ConfigError(f"{path}: more than {MAX_NESTING} tables inside one another")
    return data


# -- Classes that a setting names by their module path.


CLASS_KIND = "class"
"""Tag of the struct whose `class_path` names a class of another package."""


def class_at(
    path: str, base: type, setting: str, known: Iterable[str], error: type[Exception]
) -> Any:
    """The class at `package.module:Class`.

    Args:
        path: the value of the setting.
        base: what the class must derive from.
        setting: named in the error.
        known: the other values of the setting.
        error: raised if there is no such class.
    """
    module, _, name = path.partition(":")
    if not name:
        raise error(
            f"unknown {setting} {path!r}: choose {', '.join(known)} or package.module:Class"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as fault:
        missing = getattr(fault, "name", None) == module.partition(".")[0]
        advice = ". Install its package, or name its folder in PYTHONPATH" if missing else ""
        raise error(f"{setting} {path!r} cannot be imported: {fault}{advice}") from fault
    if not (isinstance(found, type) and issubclass(found, base)):
        raise error(f"{setting} {path!r} is not a {base.__name__}")
    return found


# -- Checks of single values: type, range and choices, as the annotations of settings have them.


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


# -- Finds every fault of a mapping of settings: unknown keys, missing ones, values of other types,
# out of range or none of the choices.


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
