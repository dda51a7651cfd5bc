"""Sleep of a cache: its device memory, and its host memory, are released while it stays open."""

from __future__ import annotations

from typing import Any

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled
from kvactors.arguments import check_int, kind
from kvactors.cpu_evictor.messages import EmptyHost
from kvactors.data_plane.engine import NoCopies
from kvactors.data_plane.local import LocalPlane, make_device
from kvactors.device.arena import bring_in
from kvactors.device.base import Device, DeviceBlocks
from kvactors.errors import (
    CacheAsleep,
    ConfigError,
    DeviceError,
    LayoutError,
    NumBlocksUnset,
    SleepUnsupported,
)
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import Pause, Resume
from kvactors.sizing import LateOpening, change_memory, opened_engine
from kvactors.system import System

PART = 512
"""Host blocks that a turn evicts."""

AWAKE_LIMIT = 10.0
"""Seconds that an index may take to admit requests again."""

LATE = "the memory was not released or taken in time"

log = get_logger()


async def sleep(self: OpenCache, level: int = 1, *, deadline: float | None = None) -> None:
    """Release device memory, and at level 2 host memory, until `wake`.

    The blocks on the device are evicted as for a request: the host tier keeps a copy as far as it
    has capacity. At level 2 the host tier is emptied too, written to storage if the write policy is
    `write_back`. Sinks are sent each removal. Then every call that needs the tiers raises
    CacheAsleep. Statistics, health and the end of the cache work. A device that was given to the
    cache is released, so that its owner can free its tensors.

    A call that raises leaves the cache awake, with fewer blocks on the device perhaps.

    Args:
        self: the cache.
        level: 1 for device memory, 2 for host memory as well.
        deadline: seconds from now, for moving the blocks.

    Raises:
        LeasesOpen: leases are open, or requests wait. Nothing changed.
        CacheAsleep: the cache sleeps already, or a sleep or a wake is in progress.
        SleepUnsupported: with ranks, with AttentionStore, and at level 2 with Mooncake, whose
            memory is registered until the cache is closed.
        DeadlineExceeded: the blocks were not moved in time.
        DeviceError: memory is still in use.
    """
    at = self._client.deadline(deadline)
    check_int("level", level, 1, 2)
    system = self.system
    _check_supported(system, level)
    await change_memory(self.system, _fall_asleep(self, level, at), at + AWAKE_LIMIT, LATE)


async def wake(
    self: OpenCache, device: Device | None = None, *, deadline: float | None = None
) -> None:
    """End a `sleep`: take memory again, and admit requests.

    A call that raises leaves the cache asleep, and can be repeated. No effect if the cache is
    awake.

    Args:
        self: the cache.
        device: the device blocks of the engine, as many as before in the same layout. Required if
            the cache was opened with a device, and else not allowed.
        deadline: seconds from now.

    Raises:
        ConfigError: `device` is missing, or is not allowed, or has another number or kind.
        LayoutError: the device does not match the layout.
        CacheAsleep: a sleep or another wake is in progress.
        DeviceError: there is not enough memory, or the device cannot be used.
        DeadlineExceeded: the device did not open in time.
    """
    at = self._client.deadline(deadline)
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device must be a Device, not {kind(device)}")
    _check_free(self.system)
    if not self.system.asleep:
        return
    _check_device(self.system, device)
    await change_memory(self.system, _wake(self, device), at, LATE)


def _check_free(system: System) -> None:
    if system.sizing is not None and not system.sizing.done():
        raise CacheAsleep("a sleep, a wake or set_num_blocks of this cache has not returned yet")


def _check_supported(system: System, level: int) -> None:
    _check_free(system)
    if system.asleep:
        raise CacheAsleep
    if not system.sized:
        raise NumBlocksUnset
    if system.ranks is not None:
        raise SleepUnsupported("devices of ranks belong to their processes: close the cache")
    if system.device_store is not None:
        raise SleepUnsupported("attention_store registers device memory until the cache is closed")
    if level > 1 and system.storage.backend == "mooncake":
        raise SleepUnsupported(
            "mooncake registers host memory until the cache is closed: use level 1"
        )


def _check_device(system: System, device: Device | None) -> None:
    before, plane = system.plane.device, system.plane
    if isinstance(plane, LocalPlane) and plane.owns_device:
        if device is not None:
            raise ConfigError("the cache makes its device itself: call wake() without one")
        return
    if device is None:
        raise ConfigError("the cache was opened with a device: give wake() its tensors again")
    if (device.num_blocks, device.kind) != (before.num_blocks, before.kind):
        raise ConfigError(
            f"the device has {device.num_blocks} blocks of kind {device.kind!r}, before the sleep "
            f"it had {before.num_blocks} of kind {before.kind!r}"
        )
    if device.layout.fingerprint != before.layout.fingerprint:
        raise LayoutError("the device has another layout than before the sleep")


async def _fall_asleep(cache: OpenCache, level: int, at: float) -> None:
    system = cache.system
    system.wiring.asleep = True
    try:
        await system.index.ask(Pause(asleep=True), deadline=at)
        if level > 1:
            await _empty_host(system, at)
        _check_unused(system)
    except BaseException:
        await uncancelled(_admit(system))
        raise
    await uncancelled(_release(cache, level))


async def _empty_host(system: System, at: float) -> None:
    """Evict every block of the host tier. Blocks that no eviction takes are dropped."""
    before, left = -1, await system.evictor.ask(EmptyHost(PART), deadline=at)
    while left and left != before:
        before, left = left, await system.evictor.ask(EmptyHost(PART), deadline=at)
    if left and await system.evictor.ask(EmptyHost(0), deadline=at):
        raise DeviceError("host slots are still in use")


def _check_unused(system: System) -> None:
    if system.arena.in_use or system.arena.kept:
        raise DeviceError("a call of the store that has not returned still uses host memory")


async def _admit(system: System) -> None:
    """Admit requests again. A new incarnation of the index does so from its beginning."""
    system.wiring.asleep = False
    try:
        await system.index.ask(Resume(awake=True), deadline=now() + AWAKE_LIMIT)
    except Exception as error:
        log.warning("the index does not admit requests", error=repr(error))


async def _release(cache: OpenCache, level: int) -> None:
    """Release the memory. Nothing uses it, and from here on the cache sleeps."""
    system = cache.system
    plane: Any = system.plane
    system.asleep = level
    engine, device = plane.engine, plane.device
    plane.engine = NoCopies()
    await engine.close()
    plane.device = DeviceBlocks(device.kind, device.layout, device.num_blocks)
    system.device = cache.device = plane.device
    if plane.owns_device and not plane.arena.kept:
        device.close()
    if level > 1 and not plane.arena.kept:
        plane.arena.give_back()
    log.info("cache asleep", level=level)


async def _wake(cache: OpenCache, device: Device | None) -> None:
    system = cache.system
    plane: Any = system.plane
    config, arena = system.config, plane.arena
    made = make_device(config.device, system.layout) if device is None else device
    try:
        if system.asleep > 1:
            await bring_in(arena, inline=plane.inline)
        if device is None:
            await bring_in(made, inline=plane.inline)
        opening = LateOpening(config.actors.open_timeout_s, system.shutdown)
        engine = await opened_engine(plane.make_engine(made), opening)
    except BaseException:
        if device is None and not arena.kept:
            made.close()
        if system.asleep > 1 and not arena.kept:
            arena.give_back()
        raise
    plane.set_device(made, engine, owned=device is None)
    system.device = cache.device = plane.device
    system.asleep = 0
    await uncancelled(_admit(system))
    log.info("cache awake")
