"""FlushNotifier and its sinks on the event loop of a `TierCache`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import Any

from kvactors.actor import ActorRef, ActorSpec, Group, InFlight, Supervisor
from kvactors.errors import ActorFailed, CacheClosed, KVActorsError
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.deliver import close_sink, open_sink
from kvactors.flush_notifier.messages import Report, WaitFlushed
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings.tables import FlushConfig
from kvactors.substitutes import NoNotifier
from kvactors.tier_cache.paths import SinkFeed

BOUND = 1024  # messages in FlushNotifier's channel


class SinkService:
    """Runs FlushNotifier. A `Service`: every method is called on the loop."""

    def __init__(self, feed: SinkFeed, sinks: Sequence[Sink]) -> None:
        self.feed = feed
        self._sinks = tuple(sinks)
        self._config = FlushConfig()
        self._epoch = time.time_ns() // 1_000_000
        self._stack = AsyncExitStack()
        self._supervisor = Supervisor(
            InFlight(), closed=lambda: CacheClosed("the cache is shut down")
        )
        self._notifier: ActorRef[Report] = self._supervisor.make_ref(FlushNotifier, BOUND)
        self._stated = 0  # the incarnation that has the whole state
        self._pump: asyncio.Task[None] | None = None
        feed.incarnation = self._running_incarnation

    async def open(self) -> None:
        spec = ActorSpec(
            FlushNotifier,
            self._make,
            self._notifier,
            lambda ref: NoNotifier(ref, block_size=self.feed.block_size, config=self._config),
        )
        try:
            for sink in self._sinks:
                self._stack.push_async_callback(close_sink, sink, self._config.timeout_s)
                await open_sink(sink)
            await self._stack.enter_async_context(
                self._supervisor.running(Group("notifier", (spec,)), drain=1.0)
            )
        except BaseException:
            await self._stack.aclose()
            raise
        self.take()

    def _make(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=self.feed.block_size,
            sinks=list(self._sinks),
            config=self._config,
            epoch=self._epoch,
            idle_limit=self.feed.idle_limit,
            token_root=self.feed.token_root,
        )

    @property
    def actor(self) -> Any:
        return self._supervisor.actor(FlushNotifier.ROLE)

    def _running_incarnation(self) -> int:
        """The incarnation of FlushNotifier that takes messages. After a failure the channel is
        emptied first: a state that was sent before that is lost."""
        return self._notifier.incarnation - self._notifier.failure_pending

    # -- messages

    def take(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        outbox = self.feed.outbox
        with suppress(KVActorsError):  # the system stops
            while outbox:
                with suppress(IndexError):  # the owner has dropped everything
                    message = outbox.popleft()
                    if not isinstance(message, int):
                        await self._notifier.tell(message)
                    elif message == self._notifier.incarnation:
                        self._stated = message

    def _has_state(self) -> bool:
        """Whether FlushNotifier has the whole state. If not, the owner's next step sends it."""
        return self._notifier.incarnation == self._stated and not self.feed.resend

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why sinks do not work. Read from any thread."""
        supervisor = self._supervisor
        if supervisor.failed is not None:
            return ("sinks: FlushNotifier has failed",)
        found = [
            f"sinks: FlushNotifier is switched off: {one.cause}"
            for one in list(supervisor.switched_off.values())
        ]
        with suppress(KeyError):
            sinks = self.actor.sinks.deliveries
            found += [f"sink {one.sink.name}: {one.last_error}" for one in sinks if one.failures]
        return tuple(found)

    async def flushed(self, limit: float) -> bool | None:
        """Whether every sink that works has acknowledged what was handed over, within `limit`
        seconds. None: the owner has to send the state again first."""
        until = asyncio.get_running_loop().time() + limit
        self.take()
        if self._pump is not None:
            await asyncio.wait([self._pump], timeout=limit)
        if not self._has_state():
            return None
        try:
            done = await self._notifier.ask(WaitFlushed(healthy=True), deadline=until)
        except ActorFailed:  # FlushNotifier restarts, unless it has failed for good
            return None if self._supervisor.failed is None else False
        except KVActorsError:
            return False
        return done if self._has_state() else None  # the answer may be that of an empty ledger

    def ask(self, limit: float, answer: Future[bool | None]) -> None:
        task = asyncio.ensure_future(self.flushed(limit))
        task.add_done_callback(
            lambda done: answer.set_result(False if done.cancelled() else done.result())
        )

    async def close(self, limit: float) -> None:
        """Send what is due, for half of `limit` at most, and close the sinks."""
        if limit > 0:
            await self.flushed(0.5 * limit)
        if self._pump is not None:
            self._pump.cancel()
        await self._stack.aclose()
