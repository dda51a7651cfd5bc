"""The number of device blocks, for a cache that was opened before it was known.

A serving loop opens its cache early (store, host memory, sinks and actors get ready), loads its
model, measures how much device memory is left, and sets the number once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from kvactors.actor.uncancelled import ended, retrieve, uncancelled
from kvactors.arguments import check_int, kind
from kvactors.attention_sdk import gpu_of
from kvactors.data_plane.engine import CopyEngine
from kvactors.data_plane.local import make_device
from kvactors.data_plane.ranks.plane import RanksPlane
from kvactors.device.arena import bring_in
from kvactors.device.base import Device
from kvactors.errors import CacheClosed, ConfigError, DeadlineExceeded, DeviceError, LayoutError
from kvactors.open_cache import OpenCache
from kvactors.opening import Opening
from kvactors.settings import Config
from kvactors.system import System

MOST_BLOCKS = 1 << 31
"""As for `device.num_blocks`."""


async def set_num_blocks(
    self: OpenCache,
    num_blocks: int,
    *,
    device: Device | None = None,
    deadline: float | None = None,
) -> None:
    """Set the number of device blocks of a cache that was opened with `device.num_blocks` 0.

    Until then `acquire`, `prefetch` and `lookup` raise NumBlocksUnset, and `health` reports the
    device. The number is set once. A call that raises changes nothing and can be repeated.

    Args:
        self: the cache.
        num_blocks: device blocks, at least 1. With ranks: of every rank. They are admitted from now
            on, and the call waits until all have joined.
        device: the device blocks of the engine, `num_blocks` of them, in the layout of the
            settings. None: a device is made from the settings.
        deadline: seconds from now for opening the device.

    Raises:
        ConfigError: the number is set already or being set, or the device has another number or
            is of another kind than `[device]`.
        LayoutError: the device does not match the layout.
        DeviceError: the device cannot be used.
        RankError: not all ranks joined in time.
        DeadlineExceeded: the device did not open in time.
    """
    at = self._client.deadline(deadline)
    check_int("num_blocks", num_blocks, 1, MOST_BLOCKS)
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device must be a Device, not {kind(device)}")
    system = self.system
    if system.sized:
        raise ConfigError(
            f"device.num_blocks is {system.plane.device.num_blocks} already, and is set once"
        )
    if system.sizing is not None and not system.sizing.done():
        raise ConfigError("device.num_blocks is being set by another call")
    config = _config_with(system, int(num_blocks), device)
    await change_memory(system, _set(self, config, device), at, "the device did not open in time")


async def change_memory(
    system: System, work: Coroutine[Any, Any, None], at: float, late: str
) -> None:
    """Run a change of the memory, the only one of its cache at this moment.

    If the deadline passes or the caller is cancelled, the change is cancelled, and this returns
    when the state is defined.

    Args:
        system: the system whose memory changes.
        work: the change.
        at: the deadline, on the loop's clock.
        late: text of the error after the deadline.

    Raises:
        DeadlineExceeded: the deadline has passed.
        CacheClosed: the cache was closed.
    """
    loop = asyncio.get_running_loop()
    task = system.sizing = loop.create_task(work, name="kvactors memory")
    task.add_done_callback(retrieve)
    try:
        await asyncio.wait((task,), timeout=max(0.0, at - loop.time()))
    finally:
        if not task.done():
            task.cancel()
            await ended(task)
    if task.cancelled():
        if system.shutdown.begun:
            raise CacheClosed("the cache was closed during this call")
        raise DeadlineExceeded(late)
    task.result()


def _config_with(system: System, num_blocks: int, device: Device | None) -> Config:
    """The settings with the number. Raises for a device that does not fit them."""
    config = system.config
    if device is not None:
        if config.ranks.count > 1:
            raise ConfigError("with ranks.count above 1, devices belong to the ranks")
        if device.num_blocks != num_blocks:
            raise ConfigError(f"num_blocks is {num_blocks}, the device has {device.num_blocks}")
        if gpu_of(config, device) != gpu_of(config, None):
            raise ConfigError(
                f"the device is of kind {device.kind!r}, and [device] names {config.device.kind!r}:"
                " name its kind and number there, so that the cache is opened for it"
            )
        if device.layout.fingerprint != system.layout.fingerprint:
            raise LayoutError(
                "the device has another layout than the cache was opened for: describe it in "
                "[layout]"
            )
    return replace(config, device=replace(config.device, num_blocks=num_blocks))


async def _set(cache: OpenCache, config: Config, device: Device | None) -> None:
    """Open the device, and inform the actors in the same step."""
    system, plane = cache.system, cache.system.plane
    if isinstance(plane, RanksPlane):
        await plane.set_num_blocks(config.device.num_blocks)
    else:
        made = make_device(config.device, system.layout) if device is None else device
        opening = LateOpening(config.actors.open_timeout_s, system.shutdown)
        try:
            if device is None:
                await bring_in(made, inline=plane.inline)
            engine = await opened_engine(plane.make_engine(made), opening)
        except BaseException:
            if device is None and not plane.arena.kept:
                made.close()
            raise
        plane.set_device(made, engine, owned=device is None)
    system.config = cache.config = config
    system.device = cache.device = plane.device
    system.wiring.blocks_set()


async def opened_engine(engine: CopyEngine, opening: Opening) -> CopyEngine:
    """Open a copy engine, or close it again."""
    try:
        await opening.step("copy engine", engine.open, DeviceError)
    except BaseException:
        await uncancelled(engine.close())
        raise
    return engine


class LateOpening(Opening):
    """Opens a part of a cache that is open. A part that is late does not end the cache."""

    def _time_to_end(self) -> float:
        return self.limit
