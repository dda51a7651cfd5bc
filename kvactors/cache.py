"""The public API of the cache: `open` a cache, `acquire` a lease for a request, compute what is missing, `finish`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from kvactors.actor import ActorRef, Ask
from kvactors.actor.clock import deadline_after
from kvactors.config import Config
from kvactors.device.base import Device
from kvactors.errors import CacheClosed, DeadlineExceeded, KVActorsError, NoRoom, Paused, StoreUnsupported
from kvactors.flush_notifier.messages import PLAIN, Origin, Settle
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.identity import CacheScope
from kvactors.lease import Lease
from kvactors.native import Path
from kvactors.observe.health import Health, health
from kvactors.observe.invariants import invariants
from kvactors.observe.statistics import CacheStatistics, collect, residency
from kvactors.prefix_index.keys import block_extras
from kvactors.prefix_index.messages import Abandon, Acquire, Clear, Pause, Prefetch, Resume, SetNamespace
from kvactors.storage.backends import Backend
from kvactors.system import System

if TYPE_CHECKING:
    from kvactors.from_thread import FromThread

Media = tuple[int, int, bytes | str | int]
"""A media item in a prompt: offset and length in tokens, and the hash of its content."""


class KVCache:
    """One open cache. All methods belong to the loop it was opened on; other threads use `from_thread`."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.config = system.config
        self.block_size = system.config.cache.block_size
        self.device: Any = system.device
        self.namespace = system.config.cache.namespace
        self._index: ActorRef = system.index
        self._loop = asyncio.get_running_loop()
        self._leases = count(1)
        self._open = True
        self._root = lru_cache(1024)(CacheScope.root)

    # -- requests

    async def acquire(
        self,
        request_id: str,
        tokens: Any,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Lease:
        """Device blocks for a request of `tokens` (list, array, numpy array of any integer dtype, memoryview).

        extra_keys: media items, which take part in the identity of the blocks they overlap. salt, lora: requests share blocks
        only if both are equal. deadline: seconds for this call and for everything the lease loads. wait: whether to wait
        for evictions whose blocks must be copied first (without, such a call is refused, but finds room a little later).

        Raises ValueError or TypeError (bad tokens or media), NoRoom, DeadlineExceeded, Paused, ActorFailed, CacheClosed.
        """
        path = self._path(tokens, extra_keys, salt, lora)
        origin = PLAIN if salt is None and lora is None else Origin(lora, salt)
        lease = next(self._leases)
        at = deadline_after(self.config.cache.deadline if deadline is None else deadline)
        try:
            granted = await self._index.ask(Acquire(lease, request_id, path, at, wait, origin), deadline=at)
        except (NoRoom, Paused):
            raise
        except BaseException:
            self.abandon(lease)
            raise
        return Lease(self, lease, request_id, path, granted)

    async def prefetch(
        self,
        tokens: Any,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """A hint that a request of `tokens` will come: what storage has of it is brought to the host tier meanwhile, within `deadline`
        seconds. Returns at once, with the number of blocks looked for. tokens and the rest, and what is raised: as in `acquire`.

        Raises StoreUnsupported with a store that moves device memory itself (AttentionStore): nothing of it goes through the host tier.
        """
        if self.system.direct is not None:
            raise StoreUnsupported(
                f"storage.backend {self.config.storage.backend!r} reads into device memory only: there is no prefetch"
            )
        path = self._path(tokens, extra_keys, salt, lora)
        at = deadline_after(self.config.cache.deadline if deadline is None else deadline)
        return int((await self._index.ask(Prefetch(path, at), deadline=at)).count)

    def _path(self, tokens: Any, extra_keys: Sequence[Media], salt: str | None, lora: str | None) -> Path:
        self._check_open()
        scope = CacheScope(self.config.cache.model, self.namespace, lora, salt)
        path = Path(self.block_size, self._root(scope, self.system.layout.fingerprint))
        path.extend(tokens)
        if not path.num_tokens:
            raise ValueError("a request needs at least one token")
        if extra_keys:
            positions, hashes = [(o, n) for o, n, _ in extra_keys], [h for _, _, h in extra_keys]
            blocks = -(-path.num_tokens // self.block_size)  # with the last one, which `extend` may fill
            for block, extra in block_extras(blocks, self.block_size, positions, hashes, path.num_tokens).items():
                path.set_extra(block, extra)
        return path

    async def ask(self, message: Ask[Any], deadline: float | None) -> Any:
        """Ask PrefixIndex. deadline: seconds, the configured ones if None."""
        self._check_open()
        at = deadline_after(self.config.cache.deadline if deadline is None else deadline)
        return await self._index.ask(message, deadline=at)

    def abandon(self, lease: int) -> None:
        """Give a lease back on behalf of somebody who cannot wait."""
        try:
            self._index.try_tell(Abandon(lease))
        except KVActorsError:
            return  # the cache is closed: there is nothing to give back to

    def abandon_from_anywhere(self, lease: int) -> bool:
        """The same from a finaliser, which may run in any thread; False if the cache is closed."""
        if not self._open or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self.abandon, lease)
        return True

    # -- the whole cache

    async def clear(self, *, storage: bool = False, deadline: float | None = None) -> int:
        """Nothing cached before this can be hit after it; leases in use stay whole. storage: empty the store as well.

        Returns the device blocks that became free at once. Raises StoreUnsupported, and clears nothing, if the store has no such
        operation (AttentionStore): call `set_namespace` or open it with another `attention_store.model_version`.
        """
        if storage and self.system.direct is not None:
            raise StoreUnsupported(
                f"storage.backend {self.config.storage.backend!r} has no call that removes blocks, so nothing was cleared: clear without "
                "storage=True, and set_namespace() or another attention_store.model_version keeps what it holds from being hit"
            )
        return int((await self.ask(Clear(storage), deadline)).count)

    async def pause(self, *, deadline: float | None = None) -> None:
        """Admit nobody; returns when no transfer is in flight. Requests acquired meanwhile wait for `resume`."""
        await self.ask(Pause(), deadline)

    async def resume(self, *, deadline: float | None = None) -> None:
        """Admit again, first those that waited."""
        await self.ask(Resume(), deadline)

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """Requests acquired from now on share only with others of this namespace (new weights must not hit old cache)."""
        await self.ask(SetNamespace(namespace), deadline)
        self.namespace = namespace

    async def settled(self, deadline: float = 30.0) -> None:
        """Return when no actor has anything left to do. DeadlineExceeded after `deadline` seconds."""
        self._check_open()
        with anyio.move_on_after(deadline) as scope:
            await asyncio.sleep(0)  # what finalisers have scheduled comes first
            await self.system.activity.quiet()
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{self.system.activity.count} messages or jobs still under way after {deadline} s")

    async def flush_settled(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """Return when every sink believes what is true. DeadlineExceeded after `deadline` seconds, ValueError for an unknown sink.

        sinks: names of those that matter, all if None. at_rest: first wait until the cache has nothing left to do. Without it, under
        load, the barrier is about what is true as of this call: residency that changes later, transfers under way now included, may
        or may not have been told.
        """
        unknown = set(sinks or ()) - self.sinks.keys()
        if unknown:
            raise ValueError(f"there is no sink {min(unknown)!r}; there are {', '.join(self.sinks) or 'none'}")
        self._check_open()
        at = deadline_after(deadline)
        if at_rest:
            await self.settled(deadline)
        with anyio.CancelScope(deadline=at) as scope:
            for actor in self.system.supervisor.actors():
                await actor.sent()
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"what the actors have to tell was not taken in {deadline} s")
        await self.system.notifier.ask(Settle(None if sinks is None else tuple(sinks)), deadline=at)

    # -- looking in

    @property
    def sinks(self) -> dict[str, Sink]:
        """The flush sinks by name."""
        return self.system.sinks

    @property
    def from_thread(self) -> FromThread:
        """The same door for other threads: every call blocks its thread until the loop has answered."""
        from kvactors.from_thread import FromThread

        return FromThread(self, self._loop)

    def statistics(self) -> CacheStatistics:
        """A moment's picture of every actor."""
        return collect(self.system)

    def health(self) -> Health:
        """Whether the cache works, works without an optional part (a sink, the notifier, a store, a rank), or has failed; and why. Cheap."""
        return health(self.system)

    def check(self) -> list[str]:
        """Look whether every invariant holds; what is violated, in words. Under load each actor looks at its own state (pools add up, no slot
        is given twice, every reference has a lease); at rest (after `settled`) also at what they say of each other."""
        return invariants(self.system)

    def divergence(self, sinks: Collection[str] | None = None) -> int:
        """Blocks on which a sink's view (of those named, of all if None) and the tiers differ. 0 at rest (after `flush_settled`)."""
        return self.system.notifier_actor.divergence(residency(self.system), sinks)

    def close(self) -> None:
        """Refuse new work; `open` calls it on the way out."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise CacheClosed("the cache is closed")
        self.system.check_usable()


@asynccontextmanager
async def open_cache(
    config: Config | None = None,
    device: Device | None = None,
    *,
    sinks: Sequence[Sink] = (),
    backend: Backend | None = None,
    inline_copies: bool = False,
) -> AsyncIterator[KVCache]:
    """A running cache. config: the defaults if None; FastDeploy's variables are honoured (see `Config.from_env`). device: made from
    the config if None. sinks: of the caller's own making, beside those of the config. backend: a store of the caller's own making, in place
    of the config's (flush-only mode leaves it alone).

    inline_copies: copy in the loop's thread, for loops of virtual time. Raises ConfigError, LayoutError, StoreError, SinkError; and at the end of
    the block CacheFailed, if the cache has failed (an exception out of the block passes, with a note).
    """
    system = System(Config.from_env(base=config), device, sinks, backend, inline_copies=inline_copies)
    async with system.running():
        cache = KVCache(system)
        try:
            yield cache
        finally:
            cache.close()
