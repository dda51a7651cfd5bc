"""The commands about settings: `config check` (a file as a whole), `config show` (the effective
settings with their origins), `config schema`, and `size`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from cyclopts import App
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from kvactors.capacity import BlockBytes, block_bytes, in_blocks
from kvactors.errors import ConfigError, KVActorsError
from kvactors.flush_notifier.sinks import class_of_sink
from kvactors.groups import group_config
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
from kvactors.settings.check import human, in_bytes, settings_of
from kvactors.settings.load import replaced, unused, variables_of
from kvactors.settings.model import read_model
from kvactors.settings.schema import json_schema
from kvactors.settings.sinks import ClassSinkConfig
from kvactors.settings.tables import GroupConfig
from kvactors.storage.factory import capacity_of

HIDDEN = "<set>"  # shown in place of a secret

SECRETS = ("ranks.secret", "storage.valkey.url")


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
    config, faults = kind.check_mapping(data)
    report = FileReport(str(path), name, faults, [])
    if report.faults:
        return report
    try:
        if kind is Config:
            config = Config.from_env(environ, config)
        for sink in config.flush.sinks:
            if isinstance(sink, ClassSinkConfig):
                class_of_sink(sink)
        report.notes = list(sizes(config))
    except KVActorsError as error:
        report.faults = [str(error)]
    return report


def sizes(config: Config) -> Iterator[str]:
    """The sizes of the tiers in blocks, tokens and bytes."""
    main, *groups = _parts(config)
    tiers = _own(config, main)
    sized = {one.tier for one in tiers}
    if "device" not in sized:
        yield "device: the number of blocks is set after opening"
    for one in tiers:
        yield f"{one.tier}: {one.blocks:,} blocks, {_note(one)}"
    for part in groups:
        for one in _own(config, part):
            yield f"{part.name}, {one.tier}: {one.blocks:,} blocks, {_note(one)}"
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

GROUP_SIZES = {
    "device": "num_blocks",
    "host": "slots",
    "transit": "transit_slots",
    "storage": "stored_blocks",
}
"""Settings of a group of layers, by tier."""

REQUEST_TOKENS = 8192
SNAPSHOT_TOKENS = 2048
"""Tokens between two snapshots of a model's state, at least."""

LEAST_TRANSIT = 4  # transit slots of a group whose blocks are larger than those of [layout]

CacheDtype = Literal["float32", "float16", "bfloat16", "uint8", "int8"]


class TierSize(msgspec.Struct):
    """A tier of a given size."""

    tier: str
    blocks: int
    tokens: int
    bytes: int
    setting: str


class GroupSize(msgspec.Struct):
    """A group of layers with a window or a state, on one rank. request_blocks: that a request of
    the report's `request_tokens` needs."""

    name: str
    kind: str
    device_bytes: float
    host_bytes: int
    storage_bytes: int
    request_blocks: int
    tiers: list[TierSize]


class SizeReport(msgspec.Struct):
    """Sizes of one rank, of the layers of `[layout]` unless said otherwise.

    Attributes:
        model: the model's architecture, empty for a file of settings.
        ranks: tensor-parallel ranks. Each has blocks of this size.
        request_tokens: tokens of a request, by whose needs memory is divided among the groups.
        requests: such requests that the device has room for at once.
        groups: of layers with a window or a state.
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
    request_tokens: int
    requests: int
    groups: list[GroupSize]


class Part(NamedTuple):
    """The layers of `[layout]`, or of a group. need: blocks that a request takes."""

    group: GroupConfig | None
    layout: Layout
    each: BlockBytes
    need: int

    def holds_no_block(self, option: str, size: str, nbytes: float) -> ConfigError:
        name = f" of the group {self.name!r}" if self.group else ""
        return ConfigError(f"{option} {size} holds no block of {human(nbytes)}{name}")

    @property
    def name(self) -> str:
        return self.group.name if self.group else ""


def _parts(config: Config, tokens: int = REQUEST_TOKENS) -> list[Part]:
    """The layers of `[layout]` and those of each group. tokens: of a request."""
    size, found = config.cache.block_size, list[Part]()
    for group in (None, *config.cache.groups):
        layout = make_layout(config.layout if group is None else group.layout, size)
        each = block_bytes(layout, StorageConfig(backend="file"))
        found.append(Part(group, layout, each, request_blocks(group, tokens, size)))
    return found


def request_blocks(group: GroupConfig | None, tokens: int, block_size: int) -> int:
    """Blocks that a request needs whose prompt is computed in chunks: all, those of the window and
    the one that grows, or its snapshots and the state that it computes on."""
    blocks = -(-tokens // block_size)
    if group is None:
        return blocks
    if group.kind == "window":
        return min(blocks, 1 - (1 - group.window) // block_size)
    return (tokens // (block_size * group.every) if group.every else 0) + 2


def _read_source(source: Path, asked: Mapping[str, Any]) -> tuple[Config, str, tuple[str, ...]]:
    """The settings of a file or of a model, the model's name, and remarks about it."""
    if source.suffix != ".toml":
        found = read_model(source, **{name: one for name, one in asked.items() if one is not None})
        storage = StorageConfig(backend="file")
        cache = CacheConfig(groups=found.groups)
        config = Config(cache=cache, layout=found.layout, storage=storage)
        return config, found.name, found.notes
    for name, value in asked.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for a model: {source} has [layout]")
    data = read_toml(source)
    return kind_of(data)[1].from_mapping(data), "", ()


def _spaced(config: Config) -> Config:
    """The settings of a model, with snapshots so far apart that they take no more bytes than the
    blocks between them."""
    size, groups = config.cache.block_size, list[GroupConfig]()
    block = make_layout(config.layout, size).block_bytes
    for group in config.cache.groups:
        snapshot = make_layout(group.layout, size).block_bytes
        every = max(-(-SNAPSHOT_TOKENS // size), -(-snapshot // block))
        groups.append(replace(group, every=every) if group.kind == "state" else group)
    return replace(config, cache=replace(config.cache, groups=tuple(groups)))


def _own(config: Config, part: Part) -> list[TierSize]:
    """The tiers that settings give a part."""
    layout = part.layout
    config = config if part.group is None else group_config(config, part.group, config.storage)
    config = in_blocks(config, layout, config.storage)
    each, host = block_bytes(layout, config.storage), config.host
    sizes = {
        "device": config.device.num_blocks,
        "host": host.slots,
        "transit": host.arena_slots(stored=config.storage.backend != "none") - host.slots,
        "storage": capacity_of(config.storage, each.storage),
    }
    return _tiers(sizes, part._replace(each=each))


def transit_slots(rate: int, slot_bytes: int, storage: StorageConfig) -> int:
    """Transit slots through which loads and saves stream at the rate of a disk, in bytes a second.

    Each direction has a slot for every transfer at once, and as many for blocks on their way to or
    from the device. A load without device blocks leaves half of all slots to evictions, so there
    are twice as many. Small blocks need more, for all that the disk moves in TURNAROUND_S.
    """
    depth = storage.io_depth + (storage.io_write_depth or storage.io_depth)
    return max(4 * depth, -int(-rate * TURNAROUND_S // slot_bytes))


def _given(
    given: Mapping[str, str | None], transit: int, parts: Sequence[Part]
) -> list[list[TierSize]]:
    """The tiers of each part that fit given sizes, divided by what a request needs. Transit slots
    are in the memory of the host."""
    sizes = [{"device": 0, "host": 0, "transit": transit, "storage": 0} for _ in parts]
    for (option, text), tier in zip(given.items(), ("device", "host", "storage"), strict=True):
        if text is None:
            continue
        size, needs = in_bytes(text, option), [one.need * getattr(one.each, tier) for one in parts]
        for part, need, found in zip(parts, needs, sizes, strict=True):
            share, nbytes = int(size * (need / sum(needs))), getattr(part.each, tier)
            found[tier] = part.layout.blocks_in(share) if tier == "device" else share // nbytes
            if not found[tier]:
                raise part.holds_no_block(option, text, nbytes)
    for part, found in zip(parts, sizes, strict=True):
        if part.group is not None and (found["host"] or transit):
            # the bytes of as many blocks of [layout]: a request loads few blocks of a group
            slots = transit or part.group.transit_slots
            few = max(LEAST_TRANSIT, slots * parts[0].each.host // part.each.host)
            found["transit"] = min(slots, few)
        if found["host"]:
            least = 0 if part.group is None else 1
            found["transit"] = max(least, min(found["transit"], found["host"] // TRANSIT_SHARE))
            found["host"] -= found["transit"]
    return [_tiers(found, part) for found, part in zip(sizes, parts, strict=True)]


def _tiers(sizes: Mapping[str, int], part: Part) -> list[TierSize]:
    layout, each, group, found = part.layout, part.each, part.group, list[TierSize]()
    for tier, blocks in sizes.items():
        nbytes = blocks * (each.storage if tier == "storage" else each.host)
        if tier == "device":
            nbytes = layout.device_bytes(blocks)
        if blocks:
            tokens = 0 if group and group.kind == "state" else blocks * layout.block_size
            setting = f"cache.groups.{GROUP_SIZES[tier]}" if group else SIZE_SETTINGS[tier]
            found.append(TierSize(tier, blocks, tokens, nbytes, setting))
    return found


def _settings(config: Config, parts: Sequence[Part], sizes: Sequence[Sequence[TierSize]]) -> str:
    tables: dict[str, list[str]] = {
        "cache": [f"block_size = {config.cache.block_size}"],
        "layout": [
            f"{name} = {toml_value(value)}" for name, value in to_builtins(config.layout).items()
        ],
    }
    for one in sizes[0]:
        table, _, name = one.setting.partition(".")
        tables.setdefault(table, []).append(f"{name} = {one.blocks}  # {_note(one)}")
    if "storage" in tables:
        tables["cache"].append('model = "NAME AND VERSION"  # blocks of models never mix')
        tables["storage"] = ['backend = "file"', 'directory = "PATH"', *tables["storage"]]
    shown = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items() if lines]
    for group, part, tiers in zip(config.cache.groups, parts[1:], sizes[1:], strict=True):
        # without a device of a given size, the share of the default one
        blocks = -(-config.device.num_blocks * part.need // parts[0].need)
        own = {"num_blocks": f"{blocks}"}
        for one in tiers:
            own[GROUP_SIZES[one.tier]] = f"{one.blocks}  # {_note(one)}"
        kept = "every" if group.kind == "state" else "window"
        same = {name: getattr(group, name) for name in ("name", "kind", kept)}
        same |= {"layout": to_builtins(group.layout)}
        lines = [f"{name} = {toml_value(value)}" for name, value in same.items()]
        lines += [f"{name} = {text}" for name, text in own.items()]
        shown.append("[[cache.groups]]\n" + "\n".join(lines))
    return "\n\n".join(shown) + "\n"


def _note(tier: TierSize) -> str:
    return f"{tier.tokens:,} tokens, {human(tier.bytes)}" if tier.tokens else human(tier.bytes)


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
def config_schema(kind: Literal["settings", "scenario", "replay"] = "settings", /) -> int:
    """Print the JSON schema of a file, for editors and other programs.

    Parameters
    ----------
    kind
        Of the file: the settings of a cache, a scenario, or the settings of a replay.
    """
    schemas: dict[str, type[Config]] = {
        "settings": Config,
        "scenario": Scenario,
        "replay": ReplayConfig,
    }
    schema = json_schema(schemas[kind], f"{kind.capitalize()} of kvactors")
    if kind == "scenario":  # `hit_rate.host = 1` is a table inside the table
        schema["$defs"]["Scenario"]["properties"]["expect"]["additionalProperties"]["anyOf"] += [
            {"type": "object"}
        ]
    write_json(schema, "-")
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
    request_tokens: int = REQUEST_TOKENS,
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
    request_tokens
        Tokens of a request. The sizes are divided by its needs among groups of layers.
    json
        Where to write the report.
    """
    check_distinct((source,), json=json)
    asked = {"dtype": dtype, "tensor_parallel": tensor_parallel, "extra_layers": extra_layers}
    config, model, notes = _read_source(source, asked)
    if block_size is not None:
        checked = convert({"block_size": block_size}, CacheConfig, "cache")
        cache = replace(config.cache, block_size=checked.block_size)
        config = replace(config, cache=cache)
    if model:
        config = _spaced(config)
    if request_tokens < 1:
        raise ConfigError(f"--request-tokens must be at least 1, not {request_tokens}")
    main, *groups = parts = _parts(config, request_tokens)
    layout, each = main.layout, main.each
    transit = 0
    if disk is not None:
        rate = in_bytes(DISK_RATE if disk_rate is None else disk_rate, "--disk-rate")
        transit = transit_slots(rate, each.host, config.storage)
    elif disk_rate is not None:
        raise ConfigError("--disk-rate is for the transit slots of a --disk")
    own = source.suffix == ".toml" and device is host is disk is None
    given = {"--device": device, "--host": host, "--disk": disk}
    sizes = [_own(config, one) for one in parts] if own else _given(given, transit, parts)
    on_device = [sum(one.blocks for one in tiers if one.tier == "device") for tiers in sizes]
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
        tiers=sizes[0],
        settings="" if own else _settings(config, parts, sizes),
        notes=list(notes),
        request_tokens=request_tokens,
        requests=min(have // part.need for have, part in zip(on_device, parts, strict=True)),
        groups=[
            GroupSize(group.name, group.kind, *one.each, one.need, tiers)
            for group, one, tiers in zip(config.cache.groups, groups, sizes[1:], strict=True)
        ],
    )
    print_size(report, Console(stderr=to_stdout(json)))
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
    if report.groups:
        rows = [
            (one.name, one.kind, f"{one.device_bytes:,.0f}", f"{one.request_blocks:,}")
            for one in report.groups
        ]
        title = f"other layers, for requests of {report.request_tokens:,} tokens"
        heads = ("group", "kind", "bytes of a block", "blocks a request")
        print_rows(title, heads, rows, console, numbers=range(2, 4))
    tiers = [("", one) for one in report.tiers]
    tiers += [(f"{group.name}, ", one) for group in report.groups for one in group.tiers]
    if tiers:
        rows = [
            (
                f"{name}{one.tier}",
                f"{one.blocks:,}",
                f"{one.tokens:,}" if one.tokens else "",
                human(one.bytes),
            )
            for name, one in tiers
        ]
        heads = ("tier", "blocks", "tokens", "bytes")
        print_rows("tiers", heads, rows, console, numbers=range(1, 4))
    if report.groups and any(one.tier == "device" for one in report.tiers):
        text = f"{report.requests:,} requests of {report.request_tokens:,} tokens at once"
        console.print(f"the device has room for {text}", highlight=False)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    if report.tiers and report.settings:
        console.print()
        console.print(report.settings, end="", highlight=False, markup=False, soft_wrap=True)
