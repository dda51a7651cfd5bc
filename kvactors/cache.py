"""The public API of the cache: `open` a cache, `acquire` a lease for a request, compute the missing
KV, `commit` and `finish`.

Bad arguments are a TypeError or ValueError that names them, and change nothing. A `deadline` is in
seconds from now, None for `cache.default_deadline_s` of the settings. A missed one raises
DeadlineExceeded. Every method raises CacheClosed once the cache is closed, and WrongLoop outside
its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from kvactors.arguments import (
    check_flag,
    kind,
)
from kvactors.calls import CacheCalls
from kvactors.device.base import Device
from kvactors.errors import WrongLoop
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.from_thread import FromThread
from kvactors.given_clock import GivenClock
from kvactors.settings import Config
from kvactors.storage.backend import Backend
from kvactors.system import System


class KVCache(CacheCalls):
    """One open cache, for the loop it was opened on. Other threads use `from_thread`."""

    @property
    def from_thread(self) -> FromThread:
        """The same calls for other threads: each blocks its thread until the loop has answered."""
        return FromThread(self, self._client.loop)


def open_cache(
    config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    device: Device | None = None,
    *,
    sinks: Sequence[Sink] = (),
    backend: Backend | None = None,
    inline_copies: bool = False,
    clock: Callable[[], float] | None = None,
) -> AbstractAsyncContextManager[KVCache]:
    """Open a cache: `async with kvactors.open(config) as cache`.

    Args:
        config: the settings, as a `Config`, a mapping or the path of a TOML file. None: the
            defaults. Environment variables fill unset values (see `Config.from_env`).
        device: the device blocks of the engine. None: a device is made from the config.
        sinks: sinks supplied by the caller, beside those of the config.
        backend: a store supplied by the caller, in place of the config's (not used in flush-only
            mode).
        inline_copies: copy in the loop's thread, for loops of virtual time.
        clock: seconds that the ages of blocks are measured in, for a replay of past requests. A pin
            with a time to live ends when that is over on the loop's clock as well. Time stands
            still while a reading raises or is no finite number. None: the loop's clock.

    Returns:
        A context manager. The cache is open inside its block.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the clock's first reading is not finite.
        ConfigError: at entry, a setting is invalid.
        OSError: at entry, the file of the settings cannot be read.
        LayoutError: at entry, the device does not match the layout.
        DeviceError: at entry, the device cannot be used.
        StoreError: at entry, the store cannot be opened.
        SinkError: at entry, a sink cannot be opened.
        RankError: at entry, not all ranks joined in time.
        WrongLoop: at entry, no asyncio event loop is running.
        CacheFailed: at the end of the block, the cache has failed. An exception out of the block
            passes instead, with a note.
    """
    for name, value, wanted in (
        ("device", device, Device),
        ("backend", backend, Backend),
    ):
        if value is not None and not isinstance(value, wanted):
            raise TypeError(f"{name} must be a {wanted.__name__}, not {kind(value)}")
    if config is not None and not isinstance(config, Config | Mapping | str | PathLike):
        raise TypeError(
            f"config must be a Config, a mapping or the path of a TOML file, not {kind(config)}"
        )
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list or tuple of Sink, not {kind(sinks)}")
    for position, sink in enumerate(sinks):
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks[{position}] must be a Sink, not {kind(sink)}")
    given = None if clock is None else GivenClock(clock)
    return _opened(
        config, device, tuple(sinks), backend, check_flag("inline_copies", inline_copies), given
    )


@asynccontextmanager
async def _opened(
    config: Config | Mapping[str, Any] | str | PathLike[str] | None,
    device: Device | None,
    sinks: Sequence[Sink],
    backend: Backend | None,
    inline_copies: bool,
    clock: Callable[[], float] | None,
) -> AsyncIterator[KVCache]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "a cache is opened on a running asyncio event loop, and there is none here (trio has "
            "its own): run the block with asyncio.run()"
        ) from None
    if isinstance(config, str | PathLike):
        config = Config.from_toml(Path(config))
    elif isinstance(config, Mapping):
        config = Config.from_mapping(config)
    system = System(
        Config.from_env(base=config),
        device,
        sinks,
        backend,
        inline_copies=inline_copies,
        clock=clock,
    )
    del device  # a sleep releases it
    cache = KVCache(system)
    try:
        async with system.running():
            try:
                yield cache
            finally:
                cache.close()
    finally:
        cache._client.stop()
