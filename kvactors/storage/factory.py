"""Storage back ends behind one contract."""

from typing import Any

from msgspec.structs import replace

from kvactors.device.base import Device, DeviceBlocks
from kvactors.errors import ConfigError, LayoutError
from kvactors.identity import StoreIdentity
from kvactors.layout.base import Layout
from kvactors.settings.check import class_at, in_bytes
from kvactors.settings.load import Config
from kvactors.settings.tables import SHARED, StorageConfig
from kvactors.storage.backend import Backend
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.file.store import FileBackend, object_stride
from kvactors.storage.header import HEADER
from kvactors.storage.memory import MemoryBackend

DIRECT = "attention_store"
KINDS = ("none", "memory", "file", *SHARED, DIRECT)


def make_backend(
    config: StorageConfig, model: str, fingerprint: bytes, block_bytes: int, block_size: int = 0
) -> Backend | None:
    """The store a config describes, None for none and for one that moves device memory itself
    (`make_device_store`). A class of another package (`package.module:Class`) is called with the
    config, the digest of the store's identity (model, namespace, layout, rank and ranks: objects
    of different digests must not mix) and the bytes of a block. Raises ConfigError, StoreError.

    fingerprint: of the layout. block_size: tokens of a block, for a store that keeps lineages; 0 if
    it is to keep none.
    """
    identity = StoreIdentity(model, config.namespace, fingerprint, config.rank, config.ranks)
    kind = config.backend
    if kind in ("none", DIRECT):
        return None
    if kind == "memory":
        return MemoryBackend(identity.digest, block_bytes, capacity_of(config, block_bytes))
    if kind == "file":
        if not config.directory:
            raise ConfigError(
                "storage.directory is needed with storage.backend = 'file' (or "
                "FILE_BACKEND_STORAGE_DIR)"
            )
        return FileBackend(
            identity.folder(config.directory),
            identity.digest,
            block_bytes,
            capacity_of(config, object_stride(block_bytes)),
            floor=in_bytes(config.free_space_floor, "storage.free_space_floor"),
            durability=config.durability,
            depth=config.io_depth,
            write_depth=config.io_write_depth or 0,
            identity=identity,
            block_size=block_size if config.keep_tokens else 0,
        )
    if kind in SHARED and config.exclusive:
        raise ConfigError("storage.exclusive has no meaning for a pool that other nodes share")
    if kind == "mooncake":
        from kvactors.storage.mooncake import MooncakeBackend
        from kvactors.storage.mooncake_client import MooncakeClient

        client = MooncakeClient(config.mooncake, config.rank)
        return MooncakeBackend(client, identity, block_bytes)
    if kind == "object":
        from kvactors.storage.object import ObjectBackend, prefix_of

        return ObjectBackend(config, prefix_of(identity), block_bytes)
    if kind == "valkey":
        from kvactors.storage.valkey import ValkeyBackend

        return ValkeyBackend(config.valkey, identity, block_bytes)
    made: Backend = class_at(kind, Backend, "storage.backend", KINDS, ConfigError)(
        config, identity.digest, block_bytes
    )
    return made


def object_layout(config: StorageConfig, layout: Layout, ranks: int = 1) -> Layout:
    """The layout of an object: that of a block, or of a range of its heads. ConfigError if they
    cannot be divided into `head_ranges`."""
    ranks = max(ranks, config.ranks)
    each, rest = divmod(config.head_ranges or ranks, ranks)
    try:
        if rest:
            raise LayoutError(f"it must be a multiple of the number of ranks, {ranks}")
        return layout.head_range(each)
    except LayoutError as error:
        raise ConfigError(f"storage.head_ranges = {config.head_ranges}: {error}") from error


def make_store(
    config: StorageConfig, model: str, layout: Layout, block_size: int = 0
) -> Backend | None:
    """`make_backend` of a layout. With `head_ranges` above the number of ranks, the store has the
    objects that so many ranks would store. Raises ConfigError, StoreError."""
    shape = object_layout(config, layout)
    if shape is layout:
        return make_backend(config, model, layout.fingerprint, layout.block_bytes, block_size)
    from kvactors.storage.head_ranges import HeadRangeStore

    each = layout.block_bytes // shape.block_bytes
    stores: list[Any] = []
    for i in range(each):
        one = replace(config, rank=each * config.rank + i, ranks=each * config.ranks)
        stores.append(make_backend(one, model, shape.fingerprint, shape.block_bytes))
    if config.backend == "mooncake":  # one client, with the devices of this rank
        from kvactors.storage.mooncake_client import MooncakeClient

        client = MooncakeClient(config.mooncake, config.rank)
        for one in stores:
            one.client = client
    return HeadRangeStore(layout, stores, config.readers + config.writers)


def has_device_store(config: Config) -> bool:
    """Whether the config names a store that moves device memory itself. ConfigError for what such a
    store cannot do."""
    if config.storage.backend != DIRECT or config.flush.flush_only:
        return False
    if config.storage.write_policy == "write_back" or config.storage.exclusive:
        raise ConfigError(
            "attention_store moves blocks between its store and the device: storage.write_policy "
            "must be write_through, write_through_selective or none, and storage.exclusive false"
        )
    return True


def make_device_store(
    config: Config, device: DeviceBlocks, shard: tuple[int, int] | None = None
) -> DeviceStore | None:
    """The store that moves device memory itself, if the config names one. ConfigError, LayoutError,
    SdkError. shard: rank and ranks, in a rank."""
    if not has_device_store(config):
        return None
    if not isinstance(device, Device):
        raise ConfigError(
            "device.num_blocks is 0, and attention_store registers the device memory when the "
            "cache is opened: set the number of blocks, or give the device to open"
        )
    from kvactors.attention_sdk import sdk_settings
    from kvactors.storage.attention_store import AttentionStoreBackend

    return AttentionStoreBackend(sdk_settings(config, device.layout, device, shard), device)


def object_bytes(config: StorageConfig, block_bytes: int) -> int:
    """Bytes that a block takes in the store that a config describes."""
    return object_stride(block_bytes) if config.backend == "file" else block_bytes


def slot_trailer_bytes(config: StorageConfig) -> int:
    """Bytes behind each slot of the arena that the store needs. ConfigError for an unknown
    class."""
    if config.backend in ("mooncake", "valkey"):
        return HEADER.size
    if ":" not in config.backend:
        return 0
    kind: type[Backend] = class_at(config.backend, Backend, "storage.backend", KINDS, ConfigError)
    return kind.slot_trailer_bytes


def capacity_of(config: StorageConfig, block_bytes: int) -> int:
    """Objects a store may hold, 0 if neither is set. ConfigError if not even one fits the bytes.

    block_bytes: that an object takes.
    """
    blocks = config.capacity_blocks or 0
    if config.capacity_bytes is None:
        return blocks
    nbytes = in_bytes(config.capacity_bytes, "storage.capacity_bytes")
    if nbytes < block_bytes:
        raise ConfigError(f"storage.capacity_bytes holds no block of {block_bytes} bytes")
    return min(nbytes // block_bytes, blocks or nbytes)
