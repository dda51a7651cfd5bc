"""Summary of an open cache: sizes in blocks and bytes, store, sinks and ranks."""

from __future__ import annotations

from typing import Any, NamedTuple


class Summary(NamedTuple):
    """The sizes and parts of an open cache.

    Attributes:
        block_bytes: of one block on one rank.
        device_bytes: of all device blocks of one rank.
        host_bytes: of all host slots of one rank.
        store: name of the storage back end, `none` without one.
        store_objects: objects that the store held when it was opened.
        store_bytes: their bytes.
        store_capacity_bytes: bytes that the store holds at most, 0 without a limit.
    """

    model: str
    namespace: str
    block_size: int
    block_bytes: int
    device_blocks: int
    device_bytes: int
    host_slots: int
    host_bytes: int
    store: str
    store_objects: int
    store_bytes: int
    store_capacity_bytes: int
    sinks: tuple[str, ...]
    ranks: int


def summarize(system: Any) -> Summary:
    """The summary of an open `System`."""
    config, storage = system.config, system.storage
    block_bytes, blocks = system.layout.block_bytes, system.plane.device.num_blocks
    slots = system.arena.num_slots
    store = system.store
    found = store.statistics() if store is not None else None
    return Summary(
        config.cache.model,
        config.cache.namespace,
        config.cache.block_size,
        block_bytes,
        blocks,
        blocks * block_bytes,
        slots,
        slots * block_bytes,
        storage.backend if system.backend is None else type(system.backend).__name__,
        0 if found is None else found.objects,
        0 if found is None else found.objects * found.object_bytes,
        0 if found is None else found.capacity * found.object_bytes,
        tuple(system.sinks),
        config.ranks.count,
    )
