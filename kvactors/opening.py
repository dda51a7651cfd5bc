"""`open` a cache: read the settings, build its parts and run them until the block ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from numbers import Real
from os import PathLike
from pathlib import Path as File
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.cache import KVCache
from kvactors.call_context import CallContext
from kvactors.checks import check_flag, kind
from kvactors.device.base import Device
from kvactors.errors import ConfigError, NotOpened, WrongLoop
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.groups import GroupedCache, open_group
from kvactors.settings import Config
from kvactors.storage.backend import Backend
from kvactors.system import System

log = get_logger()


def open_cache(
    config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    device: Device | None = None,
    *,
    sinks: Sequence[Sink] = (),
    backend: Backend | None = None,
    inline_copies: bool = False,
    clock: Callable[[], float] | None = None,
    group_devices: Mapping[str, Device] | None = None,
) -> UnopenedCache:
    """Open a cache: `async with kvactors.open(config) as cache`.

    Args:
        config: the settings, as a `Config`, a mapping or the path of a TOML file. None: the
            defaults. Environment variables fill unset values (see `Config.from_env`). They are read
            and checked in this call.
        device: the device blocks of the engine. None: a device is made from the config.
        sinks: sinks supplied by the caller, beside those of the config.
        backend: a store supplied by the caller, in place of the config's (not used in flush-only
            mode).
        inline_copies: copy in the loop's thread, for loops of virtual time.
        clock: seconds that the ages of blocks are measured in, for a replay of past requests. A pin
            with a time to live ends when that is over on the loop's clock as well. Time stands
            still while a reading raises or is not finite. None: the loop's clock.
        group_devices: by name of a group of `cache.groups`, the device blocks of the engine. The
            other groups' devices are made from the config.

    Returns:
        A context manager for one block, in which the cache is open.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the clock's first reading is not finite.
        ConfigError: a setting is invalid, or, at entry, does not suit the other parts.
        OSError: the file of the settings cannot be read.
        NotOpened: the result was used without `async with`, or a second time.
        LayoutError: at entry, the device does not match the layout.
        DeviceError: at entry, the device cannot be used.
        StoreError: at entry, the store cannot be opened.
        SinkError: at entry, a sink cannot be opened.
        RankError: at entry, not all ranks joined in time.
        WrongLoop: at entry, no asyncio event loop is running.
        CacheFailed: at the end of the block, the cache has failed. An exception out of the block
            passes instead, with a note.
    """
    for name, value, wanted in (("device", device, Device), ("backend", backend, Backend)):
        if value is not None and not isinstance(value, wanted):
            raise TypeError(f"{name} must be a {wanted.__name__}, not {kind(value)}")
    settings = _read(config)
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list or tuple of Sink, not {kind(sinks)}")
    for position, sink in enumerate(sinks):
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks[{position}] must be a Sink, not {kind(sink)}")
    given = None if clock is None else SafeClock(clock)
    if group_devices is not None and not isinstance(group_devices, Mapping):
        raise TypeError(
            f"group_devices must be a mapping of names to Device, not {kind(group_devices)}"
        )
    inline, devices = check_flag("inline_copies", inline_copies), dict(group_devices or {})
    for name, one in devices.items():
        if not isinstance(one, Device):
            raise TypeError(f"group_devices[{name!r}] must be a Device, not {kind(one)}")
    if unknown := devices.keys() - {group.name for group in settings.cache.groups}:
        raise ConfigError(f"group_devices has {min(unknown)!r}, and cache.groups has no such group")
    if settings.cache.groups and backend is not None:
        raise ConfigError("a store of the caller has blocks of one size: name it in [storage]")
    return UnopenedCache(_opened(settings, device, tuple(sinks), backend, inline, given, devices))


open = open_cache  # noqa: A001  (the public name is kvactors.open)


def _read(config: Config | Mapping[str, Any] | str | PathLike[str] | None) -> Config:
    """The settings, with environment variables for unset values."""
    if config is not None and not isinstance(config, Config | Mapping | str | PathLike):
        raise TypeError(
            f"config must be a Config, a mapping or the path of a TOML file, not {kind(config)}"
        )
    if isinstance(config, str | PathLike):
        config = Config.from_toml(File(config))
    elif isinstance(config, Mapping):
        config = Config.from_mapping(config)
    return Config.from_env(base=config)


class UnopenedCache(AbstractAsyncContextManager[KVCache]):
    """The result of `open`: `async with` opens the cache, once."""

    def __init__(self, opened: AbstractAsyncContextManager[KVCache]) -> None:
        self._opened = opened
        self._entered = False

    def __repr__(self) -> str:
        return f"<not an open cache: {NotOpened()}>"

    async def __aenter__(self) -> KVCache:
        if self._entered:
            raise NotOpened("this cache was opened before: call kvactors.open(...) again")
        self._entered = True
        return await self._opened.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # type checkers reject the wrong uses themselves

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or name not in (*dir(KVCache), "block_size", "system"):
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            raise NotOpened

        def __await__(self) -> NoReturn:
            raise NotOpened

        def __enter__(self) -> NoReturn:
            raise NotOpened

        __iter__ = __aiter__ = __reduce__ = __enter__

        def __exit__(self, *error: object) -> None:
            """Never called. Without it `with` fails before it enters."""


@asynccontextmanager
async def _opened(
    config: Config,
    device: Device | None,
    sinks: Sequence[Sink],
    backend: Backend | None,
    inline_copies: bool,
    clock: Callable[[], float] | None,
    devices: dict[str, Device],
) -> AsyncIterator[KVCache]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "a cache is opened on a running asyncio event loop, and there is none here (trio has "
            "its own): run the block with asyncio.run()"
        ) from None
    options: dict[str, Any] = {"inline_copies": inline_copies, "clock": clock}
    system = System(config, device, sinks, backend, **options)
    del device  # a sleep releases it
    contexts: list[CallContext] = []
    try:
        async with system.running(), AsyncExitStack() as stack:
            caches = [
                await stack.enter_async_context(
                    open_group(system, number, devices.pop(group.name, None), **options)
                )
                for number, group in enumerate(config.cache.groups)
            ]
            cache = GroupedCache(system, caches) if caches else KVCache(system)
            contexts.append(cache._context)
            try:
                yield cache
            finally:
                cache.close()
    finally:
        for context in contexts:
            context.stop()


class SafeClock:
    """Reads a clock of the caller. The time of a reading that fails is that of the reading before,
    and the first such reading is logged: ages stand still, and requests are served.

    Raises:
        TypeError: it is not callable, or its first reading is not a number.
        ValueError: the first reading is not finite.
    """

    __slots__ = ("_clock", "_failed", "_last")

    def __init__(self, clock: Callable[[], float]) -> None:
        if not callable(clock):
            raise TypeError(f"clock must be a function that returns seconds, not {kind(clock)}")
        self._clock, self._failed = clock, False
        self._last = self._read()

    def __call__(self) -> float:
        try:
            self._last = self._read()
        except Exception as error:
            if not self._failed:
                log.warning("clock failed", error=repr(error))
            self._failed = True
        return self._last

    def _read(self) -> float:
        seconds: Any = self._clock()
        if isinstance(seconds, bool | np.bool_) or not isinstance(seconds, Real):
            raise TypeError(f"clock must return a number of seconds, not {kind(seconds)}")
        if not math.isfinite(seconds):
            raise ValueError(f"clock must return a finite number of seconds, not {seconds}")
        return float(seconds)
