"""Settings of a `TierCache`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvactors.cpu_evictor.slots import ALONE
from kvactors.errors import ConfigError
from kvactors.settings.check import (
    MOST_BYTES,
    ByteSize,
    DeviceNumber,
    Seconds,
    SecondsOrZero,
    WritePolicy,
    convert,
    human,
    in_bytes,
    located,
)
from kvactors.settings.tables import StoreSettings
from kvactors.tier_cache.slots import PAGE

FINGERPRINT_DOMAIN = b"kvactors.tiers.v1"

BlockBytes = Annotated[int, Meta(ge=1, le=MOST_BYTES)]
Identity = Mapping[str, str | int | float | bool | None]


class TierStorage(StoreSettings, frozen=True):
    """Storage below the host tier. Sizes may be written "4GB". The settings without a description
    here (backend, directory, namespace, capacities, io_depth, ...) are those of `[storage]`.

    Attributes:
        write_policy: none, write_through (once stored on the host), write_through_selective (once
            touched `min_hits` times), write_back (ahead of eviction from the host).
        mooncake, valkey: settings of these back ends (`storage.mooncake` of a cache).
        on_full: what happens while saves in flight use the host slots: wait (a block to be saved
            keeps its slot until it is saved, and blocks of the device wait for slots), or shed
            (blocks are evicted unsaved, and those that find no slot are not stored).
        on_full_wait_s: seconds without a slot for any store, after which blocks are shed although
            on_full is wait. A store that gets slots goes on, for timeout_s at most.
        timeout_s: seconds one batch may take. A fetch that takes longer is a miss.
        slot_timeout_s: seconds for which a stored key waits for a host slot. Then it is a miss.
        open_timeout_s, close_timeout_s: seconds that opening and closing may take.
    """

    write_policy: WritePolicy = "write_through"
    mooncake: Mapping[str, Any] = {}
    valkey: Mapping[str, Any] = {}
    slot_timeout_s: SecondsOrZero = 1.0
    open_timeout_s: Seconds = 60.0
    close_timeout_s: Seconds = 5.0


class TierGroup(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a group of layers whose blocks have their own size (docs/tier_cache.md).

    Attributes:
        block_bytes: bytes of a block of the group.
        num_slots: host slots.
        capacity_bytes: bytes of the slots ("8 GiB"), in place of num_slots, in pages of 4 KiB each.
        identity: what the group's blocks must share, beside the `identity` of the cache.
    """

    block_bytes: BlockBytes
    num_slots: int = 0
    capacity_bytes: ByteSize | None = None
    identity: Identity = {}


class TierConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a `TierCache`.

    Attributes:
        model: name of the model. Blocks of different models never mix.
        block_bytes: bytes of a block, that is of a host slot and of a stored object.
        num_slots: host slots.
        capacity_bytes: bytes of the slots ("8 GiB"), in place of num_slots, in pages of 4 KiB each.
        identity: everything else that blocks must share to be interchangeable: layout, dtype,
            tokens a block, the engine's hash algorithm and seed, parallel sizes.
        policy: order of eviction from the host tier.
        storage: the tier below.
        events: the tiers whose changes `TierCache.take_events` returns, for the engine's publisher.
        sinks: indexes that kvactors informs itself, as tables of `flush.sinks` (docs/kv_events.md).
            A tier is in `events` or in the `tiers` of sinks, not in both.
        tokens_per_block: needed with sinks.
        numa_node: the NUMA node that the host slots come from, None for the system's choice.
        groups: groups of layers whose blocks have other sizes, by name. Each has a separate cache
            in `TierCache.groups`, with the policy, the events, the storage and the node of this one
            and without sinks. `storage.capacity_bytes` is divided by the bytes of the host slots.
            `storage.capacity_blocks` is of the cache's own blocks, and a group gets as many for
            each of its slots.
    """

    model: str
    block_bytes: BlockBytes
    num_slots: int = 0
    identity: Identity = {}
    policy: str = "lru"
    events: tuple[Literal["host", "storage"], ...] = ()
    storage: TierStorage = TierStorage()
    sinks: tuple[Mapping[str, Any], ...] = ()
    tokens_per_block: int = 0
    numa_node: DeviceNumber | None = None
    capacity_bytes: ByteSize | None = None
    groups: Mapping[str, TierGroup] = {}

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 over `identity` and the bytes of a block."""
        fields = {"block_bytes": self.block_bytes, "identity": dict(self.identity)}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(FINGERPRINT_DOMAIN + text.encode()).digest()

    @property
    def own(self) -> TierConfig:
        """The settings without the groups, with the share of storage of the cache's own blocks."""
        return msgspec.structs.replace(self, groups={}, storage=self._share(self))

    def group(self, name: str) -> TierConfig:
        """The settings of a group's cache.

        Raises:
            KeyError: `groups` has no such name.
            ConfigError: a setting is malformed or out of range.
        """
        config = checked_config(self)
        found = config.groups[name]
        return msgspec.structs.replace(
            config,
            block_bytes=found.block_bytes,
            num_slots=found.num_slots,
            identity={**self.identity, **found.identity, "layer group": name},
            storage=config._share(found),
            sinks=(),
            groups={},
        )

    def _share(self, of: TierConfig | TierGroup) -> TierStorage:
        """The storage with the capacity of one group's blocks."""
        storage, sizes = self.storage, {}
        if storage.capacity_bytes is not None:
            total = in_bytes(storage.capacity_bytes, "storage.capacity_bytes")
            groups: list[TierConfig | TierGroup] = [self, *self.groups.values()]
            slots = sum(one.num_slots * one.block_bytes for one in groups)
            sizes["capacity_bytes"] = total * of.num_slots * of.block_bytes // slots
        if storage.capacity_blocks is not None:
            blocks = storage.capacity_blocks * of.num_slots // self.num_slots
            sizes["capacity_blocks"] = max(1, blocks)
        return msgspec.structs.replace(storage, **sizes)


Sized = TypeVar("Sized", TierConfig, TierGroup)


def checked_config(config: TierConfig | Mapping[str, Any]) -> TierConfig:
    """A config whose values fit."""
    found = convert(config, TierConfig)
    if not found.model:
        raise ConfigError("model is needed: blocks of different models must not mix")
    found = _with_slots(found)
    groups = {name: _checked_group(name, group) for name, group in found.groups.items()}
    found = msgspec.structs.replace(found, groups=groups)
    if found.policy not in ALONE:
        raise ConfigError(f"unknown policy {found.policy!r}, known are {', '.join(ALONE)}")
    _check_storage(found.storage)
    sizes = found.storage.capacity_bytes, found.storage.capacity_blocks
    if groups and found.storage.backend == "file" and sizes == (None, None):
        raise ConfigError(
            f"storage.capacity_bytes is needed with groups ({', '.join(groups)}), which share it"
        )
    return found


def _checked_group(name: str, group: TierGroup) -> TierGroup:
    with located(f"groups.{name}"):
        if not name:
            raise ConfigError("a group needs a name")
        return _with_slots(group)


def _with_slots(config: Sized) -> Sized:
    """The config with the number of slots that its capacity in bytes holds."""
    capacity = config.capacity_bytes
    if capacity is None:
        if config.num_slots < 1:
            raise ConfigError(
                f"num_slots must be at least 1, not {config.num_slots}: set it or capacity_bytes"
            )
        return config
    if config.num_slots:
        raise ConfigError(
            f"num_slots = {config.num_slots} and capacity_bytes = {capacity!r} are two sizes of "
            "the host tier: set one"
        )
    size = in_bytes(capacity, "capacity_bytes")
    slots = size // (-(-config.block_bytes // PAGE) * PAGE)
    if slots < 1:
        raise ConfigError(
            f"capacity_bytes is {human(size)}, and one slot takes {human(config.block_bytes)} in "
            f"whole pages of {human(PAGE)}"
        )
    return msgspec.structs.replace(config, num_slots=slots, capacity_bytes=None)


def _check_storage(storage: TierStorage) -> None:
    if storage.backend == "attention_store":
        raise ConfigError(
            "storage.backend 'attention_store' moves device blocks that its SDK finds by tokens: "
            "it has no objects under an engine's keys"
        )
    if storage.backend == "file" and not storage.directory:
        raise ConfigError("storage.directory is needed with storage.backend = 'file'")
    if fault := storage.url_fault():
        raise ConfigError(fault)
    for name in ("mooncake", "valkey"):
        if getattr(storage, name) and storage.backend != name:
            raise ConfigError(f"storage.{name} is for storage.backend = {name!r}")
    if storage.capacity_blocks == 0:
        raise ConfigError("storage.capacity_blocks must be at least 1, not 0")
    if not 0 <= storage.rank < storage.ranks:
        raise ConfigError(f"storage.rank must be below {storage.ranks}, not {storage.rank}")
