"""Checks a file of settings as a whole, and shows the effective settings with their origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvactors.applicable import contradictions, unused
from kvactors.capacity import block_bytes, in_blocks
from kvactors.config import Config, StorageConfig, read_toml
from kvactors.config_faults import faults, with_class_paths
from kvactors.environment import variables_of
from kvactors.errors import ConfigError, KVActorsError
from kvactors.flush_notifier.sinks import class_of_sink
from kvactors.layout import Layout, make_layout
from kvactors.scenario.replay import ReplayConfig
from kvactors.scenario.spec import Scenario
from kvactors.sink_config import ClassSinkConfig
from kvactors.sizes import human
from kvactors.storage.backends import capacity_of
from kvactors.validation import CONFIG_TABLES, disagreements

C = TypeVar("C", bound=Config)

HIDDEN = "<set>"
"""Shown in place of a secret."""

SECRETS = ("ranks.secret",)


class FileReport(msgspec.Struct):
    """The result of a check.

    Attributes:
        file: its path.
        kind: settings, scenario or replay.
        faults: everything that is wrong.
        notes: the sizes in blocks.
    """

    file: str
    kind: str
    faults: list[str]
    notes: list[str]


def kind_of(data: Mapping[str, Any]) -> tuple[str, type[Config]]:
    """The kind of a file by its tables: a cache's settings, a scenario, or a replay."""
    if "scenario" in data or "workload" in data:
        return "scenario", Scenario
    if "replay" in data:
        return "replay", ReplayConfig
    return "settings", Config


def check_file(path: Path, environ: Mapping[str, str]) -> FileReport:
    """Check a file of settings.

    Args:
        path: a TOML file.
        environ: the variables that fill unset values.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        data = read_toml(path)
    except ConfigError as error:
        return FileReport(str(path), "settings", [str(error)], [])
    name, kind = kind_of(data)
    found, notes = check_mapping(data, kind, environ)
    return FileReport(str(path), name, found, notes)


def check_mapping(
    data: Mapping[str, Any], kind: type[Config], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Everything that is wrong with settings, and the sizes in blocks."""
    tables = with_class_paths(data, kind)
    if found := list(faults(tables, kind)):
        return found, []
    config = msgspec.convert(tables, kind)
    found = [*contradictions(config, tables), *disagreements(config)]
    if found:
        return found, []
    try:
        kind.from_mapping(data)
        config = Config.from_env(environ, config) if kind is Config else config
        for sink in config.flush.sinks:
            if isinstance(sink, ClassSinkConfig):
                class_of_sink(sink)
        return [], list(sizes(config))
    except KVActorsError as error:
        return [str(error)], []


def sizes(config: Config) -> Iterator[str]:
    """The sizes of the tiers in blocks, tokens and bytes.

    Raises:
        ConfigError, LayoutError: a size holds no block, or the layout is not possible.
    """
    layout = make_layout(config.layout, config.cache.block_size)
    config = in_blocks(config, layout, config.storage)
    each = block_bytes(layout, config.storage)
    if config.device.num_blocks:
        yield _size("device", config.device.num_blocks, each.device, layout)
    else:
        yield "device: the number of blocks is set after opening"
    if config.host.slots:
        yield _size("host", config.host.slots, each.host, layout)
    if config.storage.backend != "none":
        yield _size("transit", config.host.transit_slots, each.host, layout)
        yield from _store_size(config.storage, each.storage, layout)


def _store_size(storage: StorageConfig, each: int, layout: Layout) -> Iterator[str]:
    if storage.capacity_blocks is not None or storage.capacity_bytes is not None:
        yield _size("storage", capacity_of(storage, each), each, layout)
    elif storage.backend == "file":
        yield "storage: 80 % of the space that the file system can give"
    else:
        yield f"storage: no limit is set for {storage.backend}"


def _size(tier: str, blocks: int, nbytes: float, layout: Layout) -> str:
    tokens = blocks * layout.block_size
    return f"{tier}: {blocks:,} blocks, {tokens:,} tokens, {human(blocks * nbytes)}"


class Shown(msgspec.Struct):
    """An effective setting.

    Attributes:
        name: `table.name`.
        value: as in a file, None if unset.
        origin: default, file, or the variable that it comes from. Empty for a setting that has no
            use beside the others.
    """

    name: str
    value: Any
    origin: str


def effective(data: Mapping[str, Any], environ: Mapping[str, str]) -> list[Shown]:
    """The settings that a cache would have, with their origins.

    Args:
        data: of a file, empty for none.
        environ: the variables that fill unset values.

    Raises:
        ConfigError: a setting is invalid.
    """
    base = Config.from_mapping(data)
    config = Config.from_env(environ, base)
    found: list[Shown] = []
    for table in CONFIG_TABLES:
        values = (getattr(config, table), getattr(base, table))
        found += _shown(*values, data.get(table, {}), table, environ)
    without_use = unused(config)
    for one in found:
        table = one.name.rpartition(".")[0]
        if one.origin == "default" and {one.name, table} & without_use:
            one.origin = ""
    return found


def _shown(
    now: Any, before: Any, written: Mapping[str, Any], where: str, environ: Mapping[str, str]
) -> Iterator[Shown]:
    for name in now.__struct_fields__:
        value, full = getattr(now, name), f"{where}.{name}"
        if isinstance(value, msgspec.Struct):
            yield from _shown(value, getattr(before, name), written.get(name, {}), full, environ)
            continue
        origin = "default"
        if value != getattr(before, name):
            origin = _variable(full, environ)
        elif name in written:
            origin = "file"
        plain = msgspec.to_builtins(value)
        yield Shown(full, HIDDEN if full in SECRETS and plain else plain, origin)


def _variable(setting: str, environ: Mapping[str, str]) -> str:
    names = [name for name in variables_of(setting) if environ.get(name)]
    return names[0] if names else "derived"


def as_toml(settings: list[Shown]) -> str:
    """The settings as a TOML file, with the origins in comments."""
    lines: list[str] = []
    tables: dict[str, list[Shown]] = {}
    for one in settings:
        tables.setdefault(one.name.rpartition(".")[0], []).append(one)
    for table, some in tables.items():
        if not any(one.origin for one in some):
            lines += ["", f"# [{table}] has no use here"]
            continue
        lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        nested: list[str] = []
        for one in some:
            name = one.name.rpartition(".")[2]
            if _is_tables(one.value):
                for item in one.value:
                    nested += ["", f"[[{one.name}]]"]
                    nested += [f"{key} = {toml_value(value)}" for key, value in item.items()]
            elif one.value is None or not one.origin:
                why = "is not set" if one.value is None else "has no use here"
                lines.append(f"# {name} {why}")
            else:
                lines.append(f"{name} = {toml_value(one.value)}  # {one.origin}")
        lines += nested
    return "\n".join(lines) + "\n"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
