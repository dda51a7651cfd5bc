"""The public API of the cache: `open` a cache, `acquire` a lease for a request, compute what is
missing, `finish`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from kvactors.actor.clock import now
from kvactors.arguments import (
    Media,
    check_flag,
    check_names,
    check_seconds,
    check_text,
    kind,
    request_path,
    request_scope,
)
from kvactors.client import Client
from kvactors.config import Config
from kvactors.deprecated import renamed, warn
from kvactors.device.base import Device
from kvactors.errors import (
    ActorFailed,
    DeadlineExceeded,
    NoRoom,
    Paused,
    StoreUnsupported,
)
from kvactors.flush_notifier.messages import Resync, WaitFlushed
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.lease import Lease
from kvactors.observe.health import Health, health
from kvactors.observe.invariants import divergence_in_slices, invariants, invariants_in_slices
from kvactors.observe.statistics import CacheStatistics, collect, residency
from kvactors.prefix_index.messages import (
    Acquire,
    Clear,
    Pause,
    Prefetch,
    Resume,
    SetNamespace,
)
from kvactors.storage.backends import Backend
from kvactors.system import System
from kvactors.types import Tokens

if TYPE_CHECKING:
    from kvactors.from_thread import FromThread


class KVCache:
    """One open cache. All methods belong to the loop it was opened on (WrongLoop elsewhere). Other
    threads use `from_thread`.

    Bad arguments are a TypeError or ValueError that names them, and change nothing.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.config = system.config
        self.block_size = system.config.cache.block_size
        self.device: Any = system.device
        self._client = Client(system)
        self._leases = count(1)
        self._split_media = system.config.cache.split_media

    @property
    def namespace(self) -> str:
        """The namespace that requests are admitted under (`set_namespace`)."""
        return self.system.roots.namespace

    # -- requests

    async def acquire(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        lora_id: int | None = None,
        deadline: float | None = None,
        wait_for_evictions: bool = True,
        wait: bool | None = None,
    ) -> Lease:
        """Match a prompt against the cache and take device blocks for all of it.

        Answers from memory unless blocks must be evicted first. Loads from host or storage continue
        in the background (`Lease.wait_ready`). The request is admitted under the namespace of the
        moment at which it gets its blocks, also if it waited for them.

        Args:
            request_id: for messages and statistics. A preempted request that comes again with its
                id is counted once.
            tokens: token ids of the prompt, at least one, each in [0, 2**32): a list or tuple of
                integers, or a one-dimensional buffer (numpy array, array.array, memoryview) of any
                integer type. They are copied.
            extra_keys: media items (offset, length, hash) in ascending order. They take part in
                the identity of the blocks they overlap. `cached_tokens` never ends inside one: an
                item is cached whole or not at all (unless `cache.split_media` is set).
            salt: requests with different salts never share blocks. None is no salt; "" is a salt
                like any other.
            lora: name of the adapter. Requests with different adapters never share blocks. None is
                the base model, "" an adapter.
            lora_id: the engine's number of that adapter, sent on KV events for readers that
                identify adapters by number. It is not part of a block's identity: the name is.
            deadline: seconds from now for this call and for the loads that it starts. Loads that
                miss it are recomputed by the caller. None: `cache.deadline` of the settings (30 s).
            wait_for_evictions: whether to wait, within the deadline, for evictions in flight whose
                blocks must be copied first. Without it such a request is refused with NoRoom, and
                the evictions continue, so that a later call may find the blocks.
            wait: the earlier name of `wait_for_evictions`, deprecated.

        Returns:
            The lease. Finish it, or use it as an async context manager.

        Raises:
            NoRoom: fewer device blocks than needed are free, evictable or being freed. Nothing
                changed.
            DeadlineExceeded: no blocks became free in time.
            Paused: the cache did not resume in time.
            ActorFailed: PrefixIndex failed during the call.
            CacheClosed: the cache is closed.
            WrongLoop: the call is from another event loop or thread.
            TypeError: an argument has a wrong type.
            ValueError: an argument has a wrong value.
        """
        at = self._client.deadline(deadline)
        if wait is not None:
            warn("acquire(wait=) is deprecated: use wait_for_evictions=", stacklevel=2)
            wait_for_evictions = check_flag("wait", wait)
        check_text("request_id", request_id)
        scope = request_scope(salt, lora, lora_id)
        path, media = request_path(
            self.block_size, self.system.roots.root(scope), tokens, extra_keys
        )
        lease = next(self._leases)
        message = Acquire(
            lease,
            request_id,
            path,
            at,
            check_flag("wait_for_evictions", wait_for_evictions),
            scope,
            () if self._split_media else media,
        )
        try:
            granted = await self._client.index.ask(message, deadline=at)
        except (NoRoom, Paused):
            raise
        except BaseException as error:
            self._client.abandon(lease)
            if isinstance(error, ActorFailed):
                self._client.refine(error)
            raise
        return Lease(self._client, lease, request_id, path, granted, at)

    async def prefetch(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """A hint that a request of `tokens` will come: what storage has of it is brought to the
        host tier, within `deadline` seconds. Returns at once, with the number of blocks looked for.
        tokens and the rest, and what is raised: as in `acquire`.

        Raises StoreUnsupported with a store that moves device memory itself (AttentionStore):
        nothing of it goes through the host tier.
        """
        at = self._client.deadline(deadline)
        scope = request_scope(salt, lora)
        path, _ = request_path(self.block_size, self.system.roots.root(scope), tokens, extra_keys)
        if self.system.direct is not None:
            raise StoreUnsupported(
                f"storage.backend {self.config.storage.backend!r} reads into device memory only: "
                "there is no prefetch"
            )
        return int((await self._client.ask(Prefetch(path, at, scope), at)).count)

    # -- the whole cache

    async def clear(self, *, storage: bool = False, deadline: float | None = None) -> int:
        """Nothing cached before this can be hit after it. Leases in use stay whole. storage: empty
        the store as well.

        Returns the device blocks that became free at once. Raises StoreUnsupported, and clears
        nothing, if the store has no such operation (AttentionStore): call `set_namespace` or open
        it with another `attention_store.model_version`.
        """
        at = self._client.deadline(deadline)
        if check_flag("storage", storage) and self.system.direct is not None:
            raise StoreUnsupported(
                f"storage.backend {self.config.storage.backend!r} has no call that removes blocks, "
                "so nothing was cleared: clear without "
                "storage=True, and set_namespace() or another attention_store.model_version keeps "
                "what it holds from being hit"
            )
        return int((await self._client.ask(Clear(storage), at)).count)

    async def pause(self, *, deadline: float | None = None) -> None:
        """Stop admission. Returns when no transfer is in flight. Requests acquired from now on wait
        for `resume`."""
        await self._client.ask(Pause(), self._client.deadline(deadline))

    async def resume(self, *, deadline: float | None = None) -> None:
        """Admit again, first the requests that waited."""
        await self._client.ask(Resume(), self._client.deadline(deadline))

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """Requests admitted from now on, those that wait for blocks or for `resume` included, share
        only with others of this namespace: new weights must not hit old cache. Leases granted
        before keep theirs: finish or preempt them before the weights change. Indexes are sent that
        the blocks of other namespaces are gone, and that those of this one are there."""
        at = self._client.deadline(deadline)
        await self._client.ask(SetNamespace(check_text("namespace", namespace)), at)

    async def wait_idle(self, deadline: float = 30.0) -> None:
        """Return when no actor has anything left to do. DeadlineExceeded after `deadline`
        seconds."""
        self._client.check()
        seconds = check_seconds("deadline", deadline)
        with anyio.move_on_after(seconds) as scope:
            await asyncio.sleep(0)  # what finalisers have scheduled comes first
            await self.system.in_flight.wait_idle()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"{self.system.in_flight.count} messages or jobs are in flight after {seconds} s"
            )

    async def wait_flushed(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """Return when every sink's view equals the tiers. DeadlineExceeded after `deadline`
        seconds, ValueError for an unknown sink.

        sinks: names of those that matter, all if None. at_rest: first wait until the cache has
        nothing left to do. Without it, under load, the barrier is about residency as of this call:
        what changes later, transfers now in flight included, may or may not have been delivered.
        """
        at = self._client.deadline(deadline)
        check_flag("at_rest", at_rest)
        names = self._sink_names(sinks)
        if at_rest:
            await self.wait_idle(max(at - now(), 1e-9))
        with anyio.CancelScope(deadline=at) as scope:
            for actor in self.system.supervisor.actors():
                await actor.sent()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"the actors' messages to the notifier were not taken in {deadline} s"
            )
        await self.system.notifier.ask(WaitFlushed(names), deadline=at)

    settled = renamed("settled", wait_idle)
    flush_settled = renamed("flush_settled", wait_flushed)

    async def resync(self, sink: str, *, deadline: float | None = None) -> None:
        """Send a sink everything again, for an index that lost its state. Returns when it has taken
        that (after DeadlineExceeded it goes on). Without `Sink.repeats` what the index has is void
        first. ValueError for an unknown sink, SinkError while the notifier is switched off."""
        at = self._client.deadline(deadline)
        self._sink_names((check_text("sink", sink),))
        await self.system.notifier.ask(Resync(sink), deadline=at)

    def _sink_names(self, sinks: Collection[str] | None) -> tuple[str, ...] | None:
        names = check_names("sinks", sinks)
        unknown = set(names or ()) - self.sinks.keys()
        if unknown:
            raise ValueError(
                f"there is no sink {min(unknown)!r}; there are {', '.join(self.sinks) or 'none'}"
            )
        return names

    # -- looking in

    @property
    def sinks(self) -> dict[str, Sink]:
        """The flush sinks by name."""
        return self.system.sinks

    @property
    def from_thread(self) -> FromThread:
        """The same calls for other threads: each blocks its thread until the loop has answered."""
        from kvactors.from_thread import FromThread

        return FromThread(self, self._client.loop)

    def statistics(self) -> CacheStatistics:
        """The statistics of every actor, as of now."""
        self._client.check_thread()
        return collect(self.system)

    def health(self) -> Health:
        """Whether the cache works, works without an optional part (a sink, the notifier, a store, a
        rank), or has failed, and the reasons. Cheap."""
        self._client.check_thread()
        return health(self.system)

    def check(self) -> list[str]:
        """The invariants that are violated, one line each. Under load each actor checks its own
        state (pools add up, no slot is given twice, every reference has a lease). At rest (after
        `wait_idle`) they are also compared with each other. For tests: it keeps the loop for
        microseconds for each block of all tiers. See `check_slices`."""
        self._client.check_thread()
        return invariants(self.system)

    async def check_slices(self) -> list[str]:
        """`check` in steps of about a millisecond, between which other tasks run: for production.
        Actors are compared with each other only if nothing else happens during the call."""
        self._client.check_loop()
        return await invariants_in_slices(self.system)

    async def divergence_slices(self, sinks: Collection[str] | None = None) -> int:
        """`divergence` in steps of about a millisecond. Blocks that become resident or gone
        during the call may count as differing."""
        self._client.check_loop()
        return await divergence_in_slices(self.system, self._sink_names(sinks))

    def divergence(self, sinks: Collection[str] | None = None) -> int:
        """Blocks on which a sink's view (of those named, of all if None) and the tiers differ. 0 at
        rest (after `wait_flushed`)."""
        self._client.check_thread()
        return self.system.notifier_actor.sinks.divergence(
            residency(self.system), self._sink_names(sinks)
        )

    def close(self) -> None:
        """Refuse new work. `open` calls it on the way out. In a forked child it does nothing: every
        call is refused there already."""
        if not self.system.forked:
            self._client.check_thread()
            self._client.is_open = False


def open_cache(
    config: Config | None = None,
    device: Device | None = None,
    *,
    sinks: Sequence[Sink] = (),
    backend: Backend | None = None,
    inline_copies: bool = False,
) -> AbstractAsyncContextManager[KVCache]:
    """A running cache. config: the defaults if None; FastDeploy's variables are honoured (see
    `Config.from_env`). device: made from the config if None. sinks: of the caller's own making,
    beside those of the config. backend: a store of the caller's own making, in place of the
    config's (flush-only mode leaves it alone).

    inline_copies: copy in the loop's thread, for loops of virtual time. Raises TypeError for
    arguments of a wrong type; when it is entered ConfigError, LayoutError, StoreError, SinkError;
    and at the end of the block CacheFailed, if the cache has failed (an exception out of the block
    passes, with a note).
    """
    for name, value, wanted in (
        ("config", config, Config),
        ("device", device, Device),
        ("backend", backend, Backend),
    ):
        if value is not None and not isinstance(value, wanted):
            hint = ": see Config.from_mapping and Config.from_toml" if name == "config" else ""
            raise TypeError(f"{name} must be a {wanted.__name__}, not {kind(value)}{hint}")
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list or tuple of Sink, not {kind(sinks)}")
    for position, sink in enumerate(sinks):
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks[{position}] must be a Sink, not {kind(sink)}")
    return _opened(
        config, device, tuple(sinks), backend, check_flag("inline_copies", inline_copies)
    )


@asynccontextmanager
async def _opened(
    config: Config | None,
    device: Device | None,
    sinks: Sequence[Sink],
    backend: Backend | None,
    inline_copies: bool,
) -> AsyncIterator[KVCache]:
    system = System(
        Config.from_env(base=config), device, sinks, backend, inline_copies=inline_copies
    )
    async with system.running():
        cache = KVCache(system)
        try:
            yield cache
        finally:
            cache.close()
