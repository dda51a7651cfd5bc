"""Storage and sinks of a `TierCache`: the parts that run on an event loop in another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvactors.tier_cache.settings import TierConfig
from kvactors.tier_cache.sinks import TierSinks
from kvactors.tier_cache.slot_memory import SlotMemory
from kvactors.tier_cache.storage_tier import StorageTier
from kvactors.tier_cache.stores import make_storage

if TYPE_CHECKING:
    from kvactors.tier_cache.loop_thread import LoopThread


class Background:
    """Opens and closes storage and sinks.

    Args:
        config: settings.
        memory: the host slots.
        storage: a storage tier in place of the config's, not opened yet.
        sinks: the sinks, None for none.
        clock: the time of time-outs.

    Attributes:
        storage: the tier, None without one.
        stuck: whether a call to the store still runs after `close`.
    """

    def __init__(
        self,
        config: TierConfig,
        memory: SlotMemory,
        storage: StorageTier | None,
        sinks: TierSinks | None,
        clock: Callable[[], float],
    ) -> None:
        if storage is None and config.storage.backend != "none":
            storage = make_storage(config, memory=memory, clock=clock)
        self.storage = storage
        self.stuck = False
        self._limits = config.storage.open_timeout_s, config.storage.close_timeout_s
        self._sinks = sinks
        self._call: Callable[..., bool] = _no_loop
        self._thread: LoopThread | None = None
        if sinks is None:
            return
        if storage is not None:
            storage.beside.append(sinks.service)
            self._call = storage.call
        else:
            from kvactors.tier_cache.loop_thread import LoopThread

            self._thread = LoopThread([sinks.service])
            self._call = self._thread.call
        sinks.feed.wake = lambda: self._call(sinks.service.take)

    def open(self) -> None:
        """Open storage and sinks.

        Raises:
            StoreError: storage cannot be used, or something was not open in time.
            SinkError: a sink cannot work.
        """
        if self.storage is not None:
            self.storage.open(self._limits[0])
        elif self._thread is not None:
            self._thread.open(self._limits[0])

    def close(self) -> None:
        """Let work in flight end and close all, in about `storage.close_timeout_s` seconds."""
        limit = self._limits[1]
        if self.storage is not None:
            self.storage.close(limit)
            self.stuck = self.storage.stuck
            self.storage.poll()
        elif self._thread is not None:
            self._thread.close(limit)

    def abandon(self) -> None:
        """The process has forked: its child has no event loop."""
        if self.storage is not None:
            self.storage.abandon()
        elif self._thread is not None:
            self._thread.abandon()

    @property
    def troubles(self) -> tuple[str, ...]:
        """The parts that do not work, with reasons."""
        tier = self.storage
        storage = (
            () if tier is None else dict.fromkeys((tier.trouble, *tier.failing, tier.condition))
        )
        sinks = () if self._sinks is None else self._sinks.service.troubles
        return (*(f"storage: {one}" for one in storage if one), *sinks)

    def flushed(self, limit: float) -> bool | None:
        """Wait until every sink that works has acknowledged what was handed over, at most `limit`
        seconds. Returns whether they have, None if the owner has to send its state again first."""
        sinks = self._sinks
        if sinks is None:
            return True
        answer: Future[bool | None] = Future()
        try:
            return self._call(sinks.service.ask, limit, answer) and answer.result(limit + 1.0)
        except TimeoutError:
            return False


def _no_loop(*_work: object) -> bool:
    return False
