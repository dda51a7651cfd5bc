"""Sizes of tiers and quotas in blocks, and the bytes of a block in each tier."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from kvactors.device.arena import slot_stride
from kvactors.errors import ConfigError
from kvactors.layout.base import Layout
from kvactors.quotas import Quota, Quotas
from kvactors.settings import Config, QuotaConfig, SaltQuota, StorageConfig
from kvactors.settings.check import human, in_bytes
from kvactors.settings.check import in_blocks as size_in_blocks
from kvactors.settings.load import replaced
from kvactors.storage.backend import Backend
from kvactors.storage.factory import object_bytes, slot_trailer_bytes

C = TypeVar("C", bound=Config)


class BlockBytes(NamedTuple):
    """Bytes of one block on one rank.

    Attributes:
        device: in the device's regions, those of extra layers included.
        host: a slot of the arena, whole pages.
        storage: an object of the store, whole pages in a file store.
    """

    device: float
    host: int
    storage: int


def block_bytes(
    layout: Layout, storage: StorageConfig, backend: Backend | None = None
) -> BlockBytes:
    """The bytes that a block of a layout takes. backend: the store, in place of the one that the
    settings name."""
    trailer = slot_trailer_bytes(storage) if backend is None else backend.slot_trailer_bytes
    blocks = 1 << 20  # so many that the share of extra layers is not rounded away
    return BlockBytes(
        layout.device_bytes(blocks) / blocks,
        slot_stride(layout.block_bytes, trailer),
        object_bytes(storage, layout.block_bytes),
    )


def in_blocks(
    config: C, layout: Layout, storage: StorageConfig, backend: Backend | None = None
) -> C:
    """The config with the sizes of device and host in blocks."""
    for counted, given in replaced(config).items():
        table, name = counted.split(".")
        size = in_bytes(attrgetter(given)(config), given)
        if table == "device":
            blocks, least = layout.blocks_in(size), layout.device_bytes(1)
        else:
            least = block_bytes(layout, storage, backend).host
            blocks = size // least
        if not blocks:
            raise ConfigError(f"{given} is {human(size)}, and one block takes {human(least)}")
        changed = {name: blocks, given.partition(".")[2]: None}
        config = replace(config, **{table: replace(getattr(config, table), **changed)})
    return config


def quota_in_blocks(
    name: str, sizes: Sequence[int | str | None], block_bytes: int, object_bytes: int
) -> Quota:
    """A quota in blocks. ConfigError for a size that holds no block."""
    each = (block_bytes, block_bytes, object_bytes)
    return Quota(
        *(
            None if size is None else size_in_blocks(size, f"{name}.{tier}", nbytes)
            for tier, size, nbytes in zip(Quota._fields, sizes, each, strict=True)
        )
    )


def quotas_of(config: QuotaConfig, block_bytes: int, object_bytes: int) -> Quotas:
    """The quotas of the settings. ConfigError names the wrong one."""

    def quota(name: str, one: QuotaConfig | SaltQuota) -> Quota:
        sizes = (one.device, one.host, one.storage)
        return quota_in_blocks(name, sizes, block_bytes, object_bytes)

    named = {salt: quota(f"quota.salts.{salt}", one) for salt, one in config.salts.items()}
    return Quotas(quota("quota", config), named)
