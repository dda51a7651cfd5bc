"""The commands about settings: `config check` (a file as a whole), `config show` (the effective
settings with their origins), `config schema`, and `size`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from json import dumps
from pathlib import Path
from typing import Any, Literal

import msgspec
from cyclopts import App
from rich.console import Console
from rich.markup import escape

from kvactors.capacity import BlockBytes, block_bytes, in_blocks
from kvactors.errors import ConfigError, KVActorsError
from kvactors.flush_notifier.sinks import class_of_sink
from kvactors.layout import Layout, make_layout
from kvactors.scenario.output import (
    Output,
    check_distinct,
    print_fields,
    print_rows,
    to_stdout,
    write_json,
)
from kvactors.scenario.replay import ReplayConfig
from kvactors.scenario.shipped import find_toml
from kvactors.scenario.spec import Scenario
from kvactors.settings import CacheConfig, Config, StorageConfig, convert, read_toml
from kvactors.settings.check import changed_in, human, in_bytes, read, settings_of
from kvactors.settings.load import contradictions, replaced, unused, variables_of
from kvactors.settings.model import read_model
from kvactors.settings.schema import json_schema
from kvactors.settings.sinks import ClassSinkConfig
from kvactors.storage.factory import capacity_of

HIDDEN = "<set>"  # shown in place of a secret

SECRETS = ("ranks.secret",)


class FileReport(msgspec.Struct):
    """The result of a check."""

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
    """Check a file of settings."""
    try:
        data = read_toml(path)
    except ConfigError as error:
        return FileReport(str(path), "settings", [str(error)], [])
    name, kind = kind_of(data)
    config, faults = read(data, kind)
    report = FileReport(str(path), name, faults or list(contradictions(config, data)), [])
    if report.faults:
        return report
    try:
        own = kind is Config
        config = Config.from_env(environ, config) if own else kind.from_mapping(data)
        for sink in config.flush.sinks:
            if isinstance(sink, ClassSinkConfig):
                class_of_sink(sink)
        report.notes = list(sizes(config))
    except KVActorsError as error:
        report.faults = [str(error)]
    return report


def sizes(config: Config) -> Iterator[str]:
    """The sizes of the tiers in blocks, tokens and bytes."""
    tiers = _own(config, make_layout(config.layout, config.cache.block_size))
    sized = {one.tier for one in tiers}
    if "device" not in sized:
        yield "device: the number of blocks is set after opening"
    for one in tiers:
        yield f"{one.tier}: {one.blocks:,} blocks, {one.tokens:,} tokens, {human(one.bytes)}"
    backend = config.storage.backend
    if backend != "none" and "storage" not in sized:
        of_file = "80 % of the space that the file system can give"
        yield f"storage: {of_file if backend == 'file' else f'no limit is set for {backend}'}"


class Shown(msgspec.Struct):
    """An effective setting. origin: default, file, or a variable. Empty for one without use."""

    name: str
    value: Any
    origin: str


def effective(data: Mapping[str, Any], environ: Mapping[str, str]) -> list[Shown]:
    """The settings that a cache would have, with their origins."""
    base = Config.from_mapping(data)
    config = Config.from_env(environ, base)
    found: list[Shown] = []
    for table in settings_of(Config):
        values = (getattr(config, table), getattr(base, table))
        found += _shown(*values, data.get(table, {}), table, environ)
    without_use = {*unused(config), *replaced(config)}
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
            given = [one for one in variables_of(full) if environ.get(one)]
            origin = given[0] if given else "derived"
        elif name in written:
            origin = "file"
        plain = msgspec.to_builtins(value)
        yield Shown(full, HIDDEN if full in SECRETS and plain else plain, origin)


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
            if one.value and isinstance(one.value, list | tuple) and isinstance(one.value[0], dict):
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


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    # a text and a list are the same in JSON
    return repr(value) if isinstance(value, float) else dumps(value, ensure_ascii=False)


# -- bytes of a block in each tier, and the tiers that fit memory and disks of given sizes

GIB = 1 << 30

TRANSIT_SHARE = 8  # transit slots take at most this part of the host memory
DISK_RATE = "4 GiB"  # bytes a second of a fast NVMe drive
TURNAROUND_S = 0.02
"""Seconds that a block waits in its transit slot between a transfer of the disk and its copy."""

SIZE_SETTINGS = {
    "device": "device.num_blocks",
    "host": "host.slots",
    "transit": "host.transit_slots",
    "storage": "storage.capacity_blocks",
}

CacheDtype = Literal["float32", "float16", "bfloat16", "uint8", "int8"]


class TierSize(msgspec.Struct):
    """A tier of a given size."""

    tier: str
    blocks: int
    tokens: int
    bytes: int
    setting: str


class SizeReport(msgspec.Struct):
    """Sizes of one rank.

    Attributes:
        model: the model's architecture, empty for a file of settings.
        ranks: tensor-parallel ranks. Each has blocks of this size.
        settings: the settings for the tiers of given sizes, as TOML.
    """

    source: str
    model: str
    kind: str
    block_size: int
    ranks: int
    token_bytes: float
    device_bytes: float
    host_bytes: int
    storage_bytes: int
    blocks_per_gib: int
    tokens_per_gib: int
    tiers: list[TierSize]
    settings: str
    notes: list[str]


def _read_source(source: Path, asked: Mapping[str, Any]) -> tuple[Config, str, tuple[str, ...]]:
    """The settings of a file or of a model, the model's name, and remarks about it."""
    if source.suffix != ".toml":
        found = read_model(source, **{name: one for name, one in asked.items() if one is not None})
        storage = StorageConfig(backend="file")
        return Config(layout=found.layout, storage=storage), found.name, found.notes
    for name, value in asked.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for a model: {source} has [layout]")
    data = read_toml(source)
    return kind_of(data)[1].from_mapping(data), "", ()


def _own(config: Config, layout: Layout) -> list[TierSize]:
    config = in_blocks(config, layout, config.storage)
    each, host = block_bytes(layout, config.storage), config.host
    sizes = {
        "device": config.device.num_blocks,
        "host": host.slots,
        "transit": host.arena_slots(stored=config.storage.backend != "none") - host.slots,
        "storage": capacity_of(config.storage, each.storage),
    }
    return _tiers(sizes, layout, each)


def transit_slots(rate: int, slot_bytes: int, storage: StorageConfig) -> int:
    """Transit slots through which loads and saves stream at the rate of a disk, in bytes a second.

    Each direction has a slot for every transfer at once, and as many for blocks on their way to or
    from the device. A load without device blocks leaves half of all slots to evictions, so there
    are twice as many. Small blocks need more, for all that the disk moves in TURNAROUND_S.
    """
    depth = storage.io_depth + (storage.io_write_depth or storage.io_depth)
    return max(4 * depth, -int(-rate * TURNAROUND_S // slot_bytes))


def _given(given: Mapping[str, str | None], transit: int, layout: Layout) -> list[TierSize]:
    """The tiers that fit given sizes, with transit slots in the memory of the host."""
    each = block_bytes(layout, StorageConfig(backend="file"))
    sizes = {"device": 0, "host": 0, "transit": transit, "storage": 0}
    nbytes = {"device": each.device, "host": each.host, "storage": each.storage}
    for (option, text), (tier, one) in zip(given.items(), nbytes.items(), strict=True):
        if text is None:
            continue
        size = in_bytes(text, option)
        sizes[tier] = layout.blocks_in(size) if tier == "device" else int(size // one)
        if not sizes[tier]:
            raise ConfigError(f"{option} {text} holds no block of {human(one)}")
    if sizes["host"]:
        sizes["transit"] = min(transit, sizes["host"] // TRANSIT_SHARE)
        sizes["host"] -= sizes["transit"]
    return _tiers(sizes, layout, each)


def _tiers(sizes: Mapping[str, int], layout: Layout, each: BlockBytes) -> list[TierSize]:
    found: list[TierSize] = []
    for tier, blocks in sizes.items():
        nbytes = blocks * (each.storage if tier == "storage" else each.host)
        if tier == "device":
            nbytes = layout.device_bytes(blocks)
        if blocks:
            tokens = blocks * layout.block_size
            found.append(TierSize(tier, blocks, tokens, nbytes, SIZE_SETTINGS[tier]))
    return found


def _settings(config: Config, tiers: list[TierSize]) -> str:
    changed = changed_in(config.layout)
    tables: dict[str, list[str]] = {
        "cache": [f"block_size = {config.cache.block_size}"],
        "layout": [
            f"{name} = {toml_value(getattr(config.layout, name))}"
            for name in config.layout.__struct_fields__
            if name in changed
        ],
    }
    for one in tiers:
        table, _, name = one.setting.partition(".")
        note = f"{one.tokens:,} tokens, {human(one.bytes)}"
        tables.setdefault(table, []).append(f"{name} = {one.blocks}  # {note}")
    if "storage" in tables:
        tables["cache"].append('model = "NAME AND VERSION"  # blocks of models never mix')
        tables["storage"] = ['backend = "file"', 'directory = "PATH"', *tables["storage"]]
    shown = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items() if lines]
    return "\n\n".join(shown) + "\n"


# -- the commands

config = App(name="config", help="Check, show and describe the settings of a cache.")


@config.command(name="check")
def config_check(*files: Path, json: Output | None = None) -> int:
    """Check files of settings, scenarios or replays, with the environment variables that a cache
    reads. Every fault is printed with what is allowed. The exit status is 1 if there is one.

    Parameters
    ----------
    files
        TOML files, or names of packaged scenarios and replay settings.
    json
        Where to write what was found.
    """
    if not files:
        raise ConfigError("config check needs a file")
    check_distinct(files, json=json)
    found = [check_file(find_toml(path), os.environ) for path in files]
    console = Console(stderr=str(json) == "-", highlight=False, soft_wrap=True)
    for one in found:
        state = "[red]invalid[/red]" if one.faults else "[green]ok[/green]"
        console.print(f"[bold]{escape(one.file)}[/bold]: {one.kind}, {state}")
        for text in one.faults:
            console.print(f"  {escape(text)}")
        for text in one.notes:
            console.print(f"  {escape(text)}", style="dim")
    if json is not None:
        write_json(found, json)
    return 1 if any(one.faults for one in found) else 0


@config.command(name="show")
def config_show(file: Path | None = None, *, json: Output | None = None) -> int:
    """Print the effective settings as TOML: defaults, a file's values and those of environment
    variables, each with its origin.

    Parameters
    ----------
    file
        A TOML file of settings, none for the defaults.
    json
        Where to write the settings with their origins, in place of the TOML.
    """
    check_distinct((file,), json=json)
    data = {} if file is None else read_toml(file)
    if kind_of(data)[0] != "settings":
        raise ConfigError(f"{file} is a {kind_of(data)[0]}, not the settings of a cache alone")
    found = effective(data, os.environ)
    if json is not None:
        write_json(found, json)
    else:
        print(as_toml(found), end="")
    return 0


@config.command(name="schema")
def config_schema() -> int:
    """Print the JSON schema of a file of settings, for editors and other programs."""
    write_json(json_schema(), "-")
    return 0


def size(
    source: Path,
    /,
    *,
    block_size: int | None = None,
    dtype: CacheDtype | None = None,
    tensor_parallel: int | None = None,
    extra_layers: int | None = None,
    device: str | None = None,
    host: str | None = None,
    disk: str | None = None,
    disk_rate: str | None = None,
    json: Output | None = None,
) -> int:
    """Print the bytes of a block and a token in each tier, and the settings of the tiers that fit
    memory and a disk of given sizes. All sizes are those of one tensor-parallel rank.

    Parameters
    ----------
    source
        A model's config.json as on HuggingFace, the folder that has it, or a TOML file of settings.
    block_size
        Tokens a block. By default 64, or that of the settings.
    dtype
        Of the cache of a model. By default the model's. uint8 for fp8.
    tensor_parallel
        Ranks of a model. By default 1.
    extra_layers
        MTP or draft layers of a model that have a cache.
    device
        GPU memory for blocks, such as "20 GiB".
    host
        Host memory for blocks.
    disk
        Space on a disk for blocks.
    disk_rate
        Bytes that the disk moves in a second, for the number of transit slots. By default "4 GiB".
    json
        Where to write the report.
    """
    check_distinct((source,), json=json)
    asked = {"dtype": dtype, "tensor_parallel": tensor_parallel, "extra_layers": extra_layers}
    config, model, notes = _read_source(source, asked)
    if block_size is not None:
        checked = convert({"block_size": block_size}, CacheConfig, "cache")
        cache = msgspec.structs.replace(config.cache, block_size=checked.block_size)
        config = msgspec.structs.replace(config, cache=cache)
    layout = make_layout(config.layout, config.cache.block_size)
    each = block_bytes(layout, StorageConfig(backend="file"))
    transit = 0
    if disk is not None:
        rate = in_bytes(DISK_RATE if disk_rate is None else disk_rate, "--disk-rate")
        transit = transit_slots(rate, each.host, config.storage)
    elif disk_rate is not None:
        raise ConfigError("--disk-rate is for the transit slots of a --disk")
    own = source.suffix == ".toml" and device is host is disk is None
    given = {"--device": device, "--host": host, "--disk": disk}
    tiers = _own(config, layout) if own else _given(given, transit, layout)
    blocks = layout.blocks_in(GIB)
    report = SizeReport(
        source=str(source),
        model=model,
        kind=layout.kind,
        block_size=layout.block_size,
        ranks=config.layout.tensor_parallel,
        token_bytes=each.device / layout.block_size,
        device_bytes=each.device,
        host_bytes=each.host,
        storage_bytes=each.storage,
        blocks_per_gib=blocks,
        tokens_per_gib=blocks * layout.block_size,
        tiers=tiers,
        settings="" if own else _settings(config, tiers),
        notes=list(notes),
    )
    print_size(report, Console(stderr=to_stdout(json)))
    if json is not None:
        write_json(report, json)
    return 0


def print_size(report: SizeReport, console: Console) -> None:
    """Print the report of `size`."""
    ranks = f", each of {report.ranks} ranks" if report.ranks > 1 else ""
    print_fields(
        f"{report.model or report.source}: {report.kind}{ranks}",
        [
            ("tokens a block", f"{report.block_size}"),
            ("bytes of a token", f"{report.token_bytes:,.0f}"),
            ("bytes of a block, device", f"{report.device_bytes:,.0f}"),
            ("bytes of a block, host slot", f"{report.host_bytes:,}"),
            ("bytes of a block, file store", f"{report.storage_bytes:,}"),
            ("blocks in 1 GiB", f"{report.blocks_per_gib:,}"),
            ("tokens in 1 GiB", f"{report.tokens_per_gib:,}"),
        ],
        console,
    )
    if report.tiers:
        rows = [
            ((one.tier, f"{one.blocks:,}", f"{one.tokens:,}", human(one.bytes)), None)
            for one in report.tiers
        ]
        print_rows(
            "tiers", ("tier", "blocks", "tokens", "bytes"), rows, console, numbers=range(1, 4)
        )
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    if report.tiers and report.settings:
        console.print()
        console.print(report.settings, end="", highlight=False, markup=False, soft_wrap=True)
