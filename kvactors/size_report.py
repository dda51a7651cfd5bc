"""Bytes of a block in each tier, and the tiers that fit memory and disks of given sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvactors.capacity import block_bytes, in_blocks
from kvactors.config import Config, LayoutConfig, StorageConfig, read_toml
from kvactors.errors import ConfigError
from kvactors.layout import Layout, make_layout
from kvactors.model_config import read_model
from kvactors.settings_report import kind_of, toml_value
from kvactors.sizes import human, in_bytes
from kvactors.storage.backends import capacity_of
from kvactors.validation import check_setting

GIB = 1 << 30

TRANSIT_SHARE = 8
"""Transit slots take at most this part of the host memory."""
DISK_RATE = "4 GiB"
"""Bytes a second of a fast NVMe drive."""
TURNAROUND_S = 0.02
"""Seconds that a block waits in its transit slot between a transfer of the disk and its copy."""

CacheDtype = Literal["float32", "float16", "bfloat16", "uint8", "int8"]


class TierSize(msgspec.Struct):
    """A tier of a given size.

    Attributes:
        tier: device, host, transit or storage.
        blocks: that it holds.
        tokens: the same in tokens.
        bytes: that these blocks take.
        setting: the setting of that size.
    """

    tier: str
    blocks: int
    tokens: int
    bytes: int
    setting: str


class SizeReport(msgspec.Struct):
    """Sizes of one rank.

    Attributes:
        source: the file.
        model: the model's architecture, empty for a file of settings.
        kind: of the layout.
        block_size: tokens a block.
        ranks: tensor-parallel ranks. Each has blocks of this size.
        token_bytes: bytes of a token on the device.
        device_bytes: bytes of a block on the device.
        host_bytes: bytes of a host slot.
        storage_bytes: bytes of a block in a file store.
        blocks_per_gib: blocks in 1 GiB of the device.
        tokens_per_gib: tokens in 1 GiB of the device.
        tiers: the tiers of the given sizes.
        settings: the settings for them, as TOML.
        notes: remarks.
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


def size_report(
    source: Path,
    *,
    block_size: int | None = None,
    dtype: CacheDtype | None = None,
    tensor_parallel: int | None = None,
    extra_layers: int | None = None,
    device: str | None = None,
    host: str | None = None,
    disk: str | None = None,
    disk_rate: str | None = None,
) -> SizeReport:
    """Sizes of a model's or a file's layout.

    Args:
        source: a TOML file of settings, or a model's config.json or the folder that has it.
        block_size: tokens a block. 64 for a model, a file's own if None.
        dtype: of a model's cache, the model's own if None.
        tensor_parallel: ranks of a model, 1 if None.
        extra_layers: MTP or draft layers of a model with a cache, 0 if None.
        device: bytes for the device blocks of one rank, as a text.
        host: bytes for the arena of one rank.
        disk: bytes for the store of one rank.
        disk_rate: bytes that the disk moves in a second for one rank, DISK_RATE if None.

    Raises:
        ConfigError, LayoutError: a value is invalid.
        OSError: the file cannot be read.
    """
    notes: list[str] = []
    model = ""
    if source.suffix == ".toml":
        asked = {
            "--dtype": dtype,
            "--tensor-parallel": tensor_parallel,
            "--extra-layers": extra_layers,
        }
        for name, value in asked.items():
            if value is not None:
                raise ConfigError(f"{name} is for a model: {source} has [layout]")
        data = read_toml(source)
        config = kind_of(data)[1].from_mapping(data)
    else:
        found = read_model(
            source,
            dtype=dtype,
            tensor_parallel=1 if tensor_parallel is None else tensor_parallel,
            extra_layers=extra_layers or 0,
        )
        model, notes = found.name, list(found.notes)
        config = Config(layout=found.layout, storage=StorageConfig(backend="file"))
    if block_size is not None:
        check_setting("cache.block_size", block_size)
        cache = msgspec.structs.replace(config.cache, block_size=block_size)
        config = msgspec.structs.replace(config, cache=cache)
    layout = make_layout(config.layout, config.cache.block_size)
    own = source.suffix == ".toml" and device is host is disk is None
    each = block_bytes(layout, StorageConfig(backend="file"))
    transit = 0
    if disk is not None:
        rate = in_bytes(DISK_RATE if disk_rate is None else disk_rate, "--disk-rate")
        transit = transit_slots(rate, each.host, config.storage)
    elif disk_rate is not None:
        raise ConfigError("--disk-rate is for the transit slots of a --disk")
    tiers = _own(config, layout) if own else _given(layout, device, host, disk, transit)
    blocks = layout.blocks_in(GIB)
    return SizeReport(
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
        notes=notes,
    )


def _own(config: Config, layout: Layout) -> list[TierSize]:
    """The tiers of a file's settings."""
    config = in_blocks(config, layout, config.storage)
    each = block_bytes(layout, config.storage)
    found: list[TierSize] = []
    if config.device.num_blocks:
        found.append(_tier("device", config.device.num_blocks, layout, "device.num_blocks"))
    stored = config.storage.backend != "none"
    for tier, slots, setting in (
        ("host", config.host.slots, "host.slots"),
        ("transit", config.host.transit_slots, "host.transit_slots"),
    ):
        if config.host.slots or (stored and tier == "transit"):
            found.append(_tier(tier, slots, layout, setting, each.host))
    if config.storage.capacity_bytes is not None or config.storage.capacity_blocks is not None:
        blocks = capacity_of(config.storage, each.storage)
        found.append(_tier("storage", blocks, layout, "storage.capacity_blocks", each.storage))
    return found


def transit_slots(rate: int, slot_bytes: int, storage: StorageConfig) -> int:
    """Transit slots through which loads and saves stream at the rate of a disk.

    Each direction has a slot for every transfer at once, and as many for blocks on their way to or
    from the device. A load without device blocks leaves half of all slots to evictions, so there
    are twice as many. Small blocks need more, for all that the disk moves in TURNAROUND_S.

    Args:
        rate: bytes a second of the disk.
        slot_bytes: of a slot.
        storage: the settings of the store.
    """
    depth = storage.io_depth + (storage.io_write_depth or storage.io_depth)
    return max(4 * depth, -int(-rate * TURNAROUND_S // slot_bytes))


def _given(
    layout: Layout, device: str | None, host: str | None, disk: str | None, transit: int
) -> list[TierSize]:
    """The tiers that fit given sizes, with transit slots in the memory of the host."""
    found: list[TierSize] = []
    each = block_bytes(layout, StorageConfig(backend="file"))
    if device is not None:
        blocks = layout.blocks_in(in_bytes(device, "--device"))
        _check_one("--device", device, blocks, each.device)
        found.append(_tier("device", blocks, layout, "device.num_blocks"))
    if host is not None:
        slots = in_bytes(host, "--host") // each.host
        _check_one("--host", host, slots, each.host)
        transit = min(transit, slots // TRANSIT_SHARE)
        found.append(_tier("host", slots - transit, layout, "host.slots", each.host))
    if transit:
        found.append(_tier("transit", transit, layout, "host.transit_slots", each.host))
    if disk is not None:
        objects = in_bytes(disk, "--disk") // each.storage
        _check_one("--disk", disk, objects, each.storage)
        found.append(_tier("storage", objects, layout, "storage.capacity_blocks", each.storage))
    return found


def _check_one(option: str, size: str, blocks: int, each: float) -> None:
    if not blocks:
        raise ConfigError(f"{option} {size} holds no block of {human(each)}")


def _tier(
    tier: str, blocks: int, layout: Layout, setting: str, each: int | None = None
) -> TierSize:
    nbytes = layout.device_bytes(blocks) if each is None else blocks * each
    return TierSize(tier, blocks, blocks * layout.block_size, nbytes, setting)


def _settings(config: Config, tiers: list[TierSize]) -> str:
    """The settings of the tiers, as TOML."""
    tables: dict[str, list[str]] = {"cache": [f"block_size = {config.cache.block_size}"]}
    default = LayoutConfig()
    tables["layout"] = [
        f"{name} = {toml_value(value)}"
        for name in config.layout.__struct_fields__
        if (value := getattr(config.layout, name)) != getattr(default, name)
    ]
    for one in tiers:
        table, _, name = one.setting.partition(".")
        note = f"{one.tokens:,} tokens, {human(one.bytes)}"
        tables.setdefault(table, []).append(f"{name} = {one.blocks}  # {note}")
    if "storage" in tables:
        tables["cache"].append('model = "NAME AND VERSION"  # blocks of models never mix')
        tables["storage"] = ['backend = "file"', 'directory = "PATH"', *tables["storage"]]
    shown = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items() if lines]
    return "\n\n".join(shown) + "\n"
