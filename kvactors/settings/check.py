"""Types of settings with their ranges, and the walk that compares tables of settings with their
types, finds every fault and builds the structs."""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints_of

import msgspec
from msgspec import Meta

from kvactors.errors import ConfigError

S = TypeVar("S")

# -- types: the walk enforces the ranges, the JSON schema and the reference show them

MAX_TOKENS = 1 << 24
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
"""Tokens of a prompt or of a part of one. A run holds them in memory."""

TokensOrZero = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
"""At least one: blocks, ranks, heads."""

Number = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A count that may be zero, or a number that counts from zero."""

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
MOST_BYTES = 1 << 50  # 1 PiB

ByteCount = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A time limit or an interval, which may not be zero."""

SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]  # a second
Multiple = Annotated[float, Meta(ge=1, le=1 << 10)]

SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[iI]?[bB]?\s*$"

BlockSize = Count | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Blocks, or bytes as a text with a unit such as "8 GiB" (see `in_bytes`)."""

ByteSize = ByteCount | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Bytes, or a text such as "8 GiB" (see `in_bytes`)."""

WritePolicy = Literal["none", "write_through", "write_through_selective", "write_back"]


# -- rules beside a setting, in its annotation (`load` applies them)


class UsedIf(NamedTuple):
    """A condition under which a setting has a use. Given without it, the setting is an error.

    Attributes:
        why: the reason in the error, a format of the config.
        at_default: whether the setting counts as given if a file has it with its default value.
    """

    holds: Callable[[Any], object]
    why: str
    at_default: bool = True


class InPlaceOf(NamedTuple):
    """A size in bytes that is given in place of the setting with the same size in blocks."""

    blocks: str


class Variable(NamedTuple):
    """An environment variable that fills a setting which the config leaves unset. switch: the
    values that 0 and 1 stand for. None: the text or the number is the value."""

    name: str
    switch: tuple[Any, Any] | None = None


class Setting(NamedTuple):
    """A field of a table. default: `msgspec.NODEFAULT` without one or with a factory."""

    hint: Any
    marks: tuple[Any, ...]
    default: Any
    required: bool


@lru_cache
def settings_of(table: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings of a table by name."""
    fields = {field.name: field for field in msgspec.structs.fields(table)}
    found = {}
    for name, hint in type_hints_of(table, include_extras=True).items():
        field, marks = fields[name], ()
        if get_origin(hint) is Annotated:
            metas = hint.__metadata__
            marks = tuple(one for one in metas if not isinstance(one, Meta))
            ranges = tuple(one for one in metas if isinstance(one, Meta))
            hint = Annotated[hint.__origin__, *ranges] if ranges else hint.__origin__
        found[name] = Setting(hint, marks, field.default, field.required)
    return found


def changed_in(table: msgspec.Struct) -> set[str]:
    """Names of the settings of a table that differ from their defaults."""
    default = type(table)()
    return {
        name for name in table.__struct_fields__ if getattr(table, name) != getattr(default, name)
    }


# -- sizes in bytes, or in blocks and bytes: a number, or a text with a unit

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
"""Powers of 1024, with or without an i: "8 GB", "8 GiB" and "8g" are the same size."""


def in_bytes(size: int | str, name: str) -> int:
    """A size in bytes."""
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
    """A size in blocks: a number is one of blocks, a text with a unit one of bytes. size: blocks
    such as 4096 or "4096", or bytes such as "8 GiB". Raises ConfigError: it is neither, holds no
    block, or is in bytes and `block_bytes` is None."""
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


# -- files of settings: their size and their nesting are bounded

SETTINGS_BYTES = 16 << 20  # bytes of a file of settings at most
MAX_NESTING = 32  # tables and lists inside one another in a file, at most


def read_settings(path: str | Path) -> bytes:
    """The contents of a file of settings, or of a device or a pipe in its place."""
    # The opening of a pipe that no process writes would not return.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(SETTINGS_BYTES + 1)
        if not data and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is a pipe that no process writes: it holds no settings")
    if len(data) > SETTINGS_BYTES:
        raise ConfigError(f"{path} has more than {SETTINGS_BYTES >> 20} MiB: it holds no settings")
    return data


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as a mapping."""
    raw = read_settings(path)
    too_deep = ConfigError(f"{path}: more than {MAX_NESTING} tables or lists inside one another")
    try:
        data = tomllib.loads(raw.decode())
    except RecursionError:
        raise too_deep from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValueError:  # of int(), whose text advises a setting of the interpreter
        raise ConfigError(f"{path}: a whole number has too many digits") from None
    level: list[Any] = [data]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise too_deep
    return data


# -- the walk

CLASS_KIND = "class"  # tag of the struct whose `class_path` names a class of another package


def convert(data: Any, kind: type[S], where: str = "") -> S:
    """Settings as `read` builds them. Raises ConfigError: names the first fault, with the choices
    or the range, or the nearest name."""
    built, faults = read(data, kind, where)
    if faults:
        raise ConfigError(faults[0])
    found: S = built
    return found


def read(data: Any, kind: Any, where: str = "") -> tuple[Any, list[str]]:
    """Check every value of settings once, and build their structs.

    Args:
        data: a mapping, or a struct that was constructed, or a list of them.
        kind: a struct, a union of tagged ones, or a tuple of either.

    Returns:
        The structs, which are whole if there is no fault, and every fault.
    """
    faults: list[str] = []
    return _read(data, kind, where, faults), faults


def _read(data: Any, kind: Any, where: str, faults: list[str]) -> Any:
    """`read`, for a part of the settings. None for a part with faults."""
    tables = tuple(one for part in _parts(kind) if not get_args(part) for one in structs_of(part))
    try:
        if isinstance(data, tables):
            return _read_struct(data, where, faults)
        if tables and isinstance(data, Mapping):
            return _read_mapping(data, tables, where, faults)
        for part in _parts(kind):
            origin, inner = get_origin(part), get_args(part)
            if origin in (list, tuple) and isinstance(data, list | tuple):
                return origin(_read_list(data, inner, where, faults))
            if origin in (dict, Mapping) and inner[1] is not Any and isinstance(data, Mapping):
                return _read_dict(data, inner[1], where, faults)
        return checked_value(where or "the settings", data, kind)
    except ConfigError as error:
        faults.append(str(error))
        return None


def _read_struct(data: msgspec.Struct, where: str, faults: list[str]) -> Any:
    changed: dict[str, Any] = {}
    for name, setting in settings_of(type(data)).items():
        if (value := getattr(data, name)) is not setting.default:
            changed[name] = _read(value, setting.hint, f"{where}.{name}" if where else name, faults)
    return data if faults else msgspec.structs.replace(data, **changed)


def _read_list(
    data: Iterable[Any], kinds: tuple[Any, ...], where: str, faults: list[str]
) -> list[Any]:
    items = list(data)
    if len(kinds) > 1 and kinds[1] is not ... and len(items) != len(kinds):
        raise ConfigError(f"{where} must have {len(kinds)} values, not {len(items)}")
    return [_read(one, kinds[0], f"{where}[{at}]", faults) for at, one in enumerate(items)]


def _read_dict(data: Mapping[Any, Any], kind: Any, where: str, faults: list[str]) -> dict[str, Any]:
    if unnamed := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(f"{where} must have texts as names, not {unnamed[0]!r:.80}")
    return {key: _read(one, kind, f"{where}.{key}", faults) for key, one in data.items()}


def _read_mapping(
    data: Mapping[str, Any], tables: tuple[type[msgspec.Struct], ...], where: str, faults: list[str]
) -> Any:
    table, tag, before = tables[0], tables[0].__struct_config__.tag_field, len(faults)
    if tag is not None:
        by_tag = {str(one.__struct_config__.tag): one for one in tables}
        known = ["package.module:Class" if one == CLASS_KIND else one for one in by_tag]
        if tag not in data:
            raise ConfigError(f"{where}.{tag} is missing: choose one of {', '.join(known)}")
        kind = data[tag]
        if CLASS_KIND in by_tag and isinstance(kind, str) and ":" in kind:
            data, kind = {**data, "class_path": kind}, CLASS_KIND
        if str(kind) not in by_tag:
            raise ConfigError(unknown(f"{where}.{tag}", str(kind), known))
        table = by_tag[str(kind)]
    prefix = f"{where}." if where else ""
    settings, values = settings_of(table), {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key in settings:
            values[key] = _read(value, settings[key].hint, name, faults)
        elif key != tag:
            text = unknown("key", str(key), list(settings))
            faults.append(text.replace(repr(key), repr(name), 1))
    missing = [name for name, one in settings.items() if one.required and name not in data]
    faults += [f"{prefix}{name} is missing" for name in missing]
    if len(faults) > before:
        return None
    try:
        return table(**values)
    except (TypeError, ValueError) as error:  # of values that do not fit together
        raise ConfigError(f"{where}: {error}") from None


def structs_of(kind: Any) -> tuple[type[msgspec.Struct], ...]:
    """The structs of a type, none if it has other values too."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return (kind,)
    if get_origin(kind) is tuple:
        return structs_of(get_args(kind)[0])
    found = [structs_of(inner) for inner in _parts(kind) if inner is not kind]
    return tuple(one for structs in found for one in structs) if all(found) else ()


@contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the text of a ConfigError with the place of the settings."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# -- single values: type, range and choices

LONGEST = 4096  # characters in a text setting
SHOWN = 80  # characters of a wrong value in an error
NEAR = 0.6  # similarity of two names from which on one is suggested for the other

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """A setting's value as its type has it."""
    # The text is checked before its type: an error about a choice would contain all of it.
    if isinstance(value, str):
        _check_text(name, value)
    try:
        found = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise ConfigError(_mismatch(name, value, hint)) from None
    if isinstance(found, float) and not isfinite(found):
        raise ConfigError(f"{name} must be a finite number, not {value}")
    if isinstance(found, str) and _is_size(hint):
        in_bytes(found, name)
    return found


def _is_size(hint: Any) -> bool:
    return any(meta.pattern == SIZE_PATTERN for meta in _ranges(hint))


def _check_text(name: str, value: str) -> None:
    if "\0" in value or len(value) > LONGEST:
        raise ConfigError(
            f"{name} must have no NUL character and at most {LONGEST} characters, not "
            f"{value[:40]!r}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is no text: {error}") from None


def unknown(what: str, value: str, known: list[str]) -> str:
    """An error about a name that is not one of those known, with the nearest one."""
    near = difflib.get_close_matches(value, known, n=1, cutoff=NEAR)
    near = near or [name for name in known if name.startswith(f"{value}_")]
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value[:SHOWN]!r}{hint}" + (
        f" There are {', '.join(known)}" if near else f": there are {', '.join(known)}"
    )


def describe(hint: Any) -> str:
    """The values that a type allows."""
    parts = [part for part in _parts(hint) if part is not type(None)]
    if _is_size(hint):
        return 'a size: bytes, or a text such as "8 GiB"'
    return " or ".join(dict.fromkeys(_describe(part) for part in parts))


def choices(hint: Any) -> tuple[str, ...]:
    """The choices of a type, none if it has other values too."""
    parts = [part for part in _parts(hint) if part is not type(None)]
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        return tuple(map(str, get_args(parts[0])))
    return ()


def bounds(hint: Any) -> str:
    """The range of a type, empty if it has none."""
    for meta in _ranges(hint):
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
        inner = describe(get_args(part)[0])
        return "a list of tables" if inner == "a table" else f"a list, each {inner}"
    if (get_origin(part) or part) in (dict, Mapping) or structs_of(part):
        return "a table"
    return NAMES.get(part, "any value")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _ranges(hint: Any) -> list[Meta]:
    metas = [meta for part in _parts(hint) for meta in getattr(part, "__metadata__", ())]
    return [meta for meta in metas if isinstance(meta, Meta)]


def _mismatch(name: str, value: Any, hint: Any) -> str:
    if (known := choices(hint)) and isinstance(value, str):
        return unknown(name, value, list(known))
    if isinstance(value, int | float) and not isinstance(value, bool):
        for meta in _ranges(hint):
            if bound := _exceeded(value, meta):
                return f"{name} must be {bound}, not {value} (allowed: {bounds(hint)})"
    return f"{name} must be {describe(hint)}, not {repr(value)[:SHOWN]}"


def _exceeded(value: float, meta: Meta) -> str:
    if meta.gt is not None and not value > meta.gt:
        return f"above {_plain(meta.gt)}"
    if meta.ge is not None and not value >= meta.ge:
        return f"at least {_plain(meta.ge)}"
    return f"at most {_plain(meta.le)}" if meta.le is not None and not value <= meta.le else ""


def _plain(number: float | None) -> str:
    assert number is not None
    return f"{number:.0f}" if number == int(number) else f"{number:g}"


# -- addresses and classes of other packages

LAST_PORT = 65_535


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The host, without brackets, and the port of tcp://host:port. Raises ValueError: with the
    reason, which continues the name of the setting."""
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"must be tcp://host:port with a number for the port, not {endpoint!r}")
    if int(port) > LAST_PORT:
        raise ValueError(f"must have a port of at most {LAST_PORT}, not {endpoint!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError(
            f"must have an IPv6 address in brackets, as in tcp://[::1]:5557, not {endpoint!r}"
        )
    return host[1:-1] if bracketed else host, int(port)


def class_at(
    path: str, base: type, setting: str, known: Iterable[str], error: type[Exception]
) -> Any:
    """The class at `package.module:Class`."""
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


def logger() -> Any:
    """The logger. Imported late: an engine reads settings of its tiers without the runtime."""
    from kvactors.actor.log import get_logger

    return get_logger()
