"""Calls of an open cache: the methods of `KVCache` that `FromThread` has for other threads.

Bad arguments are a TypeError or ValueError that names them, and change nothing. A `deadline` is in
seconds from now, None for `cache.default_deadline_s` of the settings. A missed one raises
DeadlineExceeded. Every method raises CacheClosed once the cache is closed, and WrongLoop outside
its event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import CoroutineType

from kvactors import lookup as look
from kvactors import sizing, sleeping, steps, tenants, waits
from kvactors.arguments import (
    Media,
    check_flag,
    check_int,
    check_text,
    kind,
    request_path,
    request_scope,
)
from kvactors.device_events import Completion, Pass, Stream
from kvactors.errors import (
    ActorFailed,
    NoRoom,
    Paused,
    StoreUnsupported,
)
from kvactors.flush_notifier.messages import PLAIN, Resync
from kvactors.hints import Hints, check_hints
from kvactors.lease import Lease
from kvactors.observe.health import Health, health
from kvactors.observe.invariants import divergence_in_slices, invariants, invariants_in_slices
from kvactors.observe.statistics import (
    CacheStatistics,
    Tenants,
    collect,
    collect_tenants,
    residency,
)
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import (
    Acquire,
    AcquireResult,
    Pause,
    Prefetch,
    Resume,
    SetNamespace,
)
from kvactors.steps import SteppedLease
from kvactors.types import Tokens


class CacheCalls(OpenCache):
    """The calls of an open cache, for the loop it was opened on."""

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
        wait_for_room: bool = False,
        chunk_tokens: int | None = None,
        hints: Hints | None = None,
    ) -> Lease:
        """Match a prompt against the cache and take device blocks for all of it, or for a chunk.

        Answers from memory unless blocks must be evicted first. Loads from host or storage continue
        in the background (`Lease.wait_ready`). The namespace at the time of admission applies.

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
                miss it are recomputed by the caller. None: `cache.default_deadline_s`.
            wait_for_evictions: whether to wait, within the deadline, for evictions in flight whose
                blocks must be copied first. Without it such a request is refused with NoRoom, and
                the evictions continue, so that a later call may find the blocks. Wait a millisecond
                before that call: a loop of calls without a pause keeps the interpreter from the
                threads that copy.
            wait_for_room: whether to wait, within the deadline, until other requests release device
                blocks. Requests that wait are admitted in the order of their calls. Later ones that
                fit overtake a waiting request 64 times at most, and then only if they fit on the
                device beside it. A request that waits holds nothing. Evictions are waited for as
                well.
            chunk_tokens: for chunked prefill: match the whole prompt, but take device blocks for
                the cached tokens and at most so many after them. `Lease.next_chunk` takes more.
                With a store whose contents only a query can tell, every block that it may have gets
                a device block.
            hints: about the reuse of the request's blocks.

        Returns:
            The lease. Finish it, or use it as an async context manager.

        Raises:
            NoRoom: fewer device blocks than needed are free, evictable or being freed, or other
                requests wait for them. With `wait_for_room`: blocks that stay pinned until the
                deadline keep the request out. Nothing changed.
            NeverFits: a NoRoom: the request needs more blocks than the device has, so that waiting
                is of no use.
            DeadlineExceeded: no blocks became free in time.
            Paused: the cache did not resume in time.
            NumBlocksUnset: the number of device blocks is not set yet.
            ActorFailed: PrefixIndex failed during the call.
        """
        at = self._client.deadline(deadline)
        check_text("request_id", request_id)
        scope = PLAIN
        if salt is not None or lora is not None or lora_id is not None:
            scope = request_scope(salt, lora, lora_id)
        roots = self.system.roots
        root = roots.plain if scope is PLAIN else roots.root(scope)
        path, media = request_path(self.block_size, root, tokens, extra_keys)
        if wait_for_evictions is not True:
            wait_for_evictions = check_flag("wait_for_evictions", wait_for_evictions)
        if wait_for_room is not False:
            wait_for_room = check_flag("wait_for_room", wait_for_room)
        if hints is not None:
            hints = check_hints(hints)
        chunk = 0 if chunk_tokens is None else check_int("chunk_tokens", chunk_tokens, 1)
        stored = None
        if self.system.index_actor.core.settings.fetch:
            stored = await look.count_stored(self, path, scope, media)
        lease = next(self._leases)
        message = Acquire(
            lease,
            request_id,
            path,
            at,
            wait_for_evictions,
            scope,
            () if self._split_media else media,
            wait_for_room,
            chunk,
            stored,
            hints,
        )
        try:
            asked = self._client.index.entrance.begin_ask(message, at, queued=wait_for_room)
            granted: AcquireResult = await asked if isinstance(asked, CoroutineType) else asked
        except (NoRoom, Paused):
            raise
        except BaseException as error:
            self._client.abandon(lease)
            if isinstance(error, ActorFailed):
                self._client.refine(error)
            raise
        return Lease(self._client, lease, request_id, path, granted, at, media)

    def record_pass(
        self,
        leases: Sequence[SteppedLease],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
    ) -> Pass:
        """Record that the device computes a forward pass: it uses the blocks of `leases` until an
        event completes. A lease that ends before keeps its blocks until then, however it ends:
        `finish`, `preempt` and a `truncate` that drops blocks wait for the event, and after
        `abandon`, a cancellation or a garbage collection the blocks are released with it.

        Call it in the step of the loop that starts the pass. Passes may overlap. A pass whose event
        fails is over. While an event is overdue its blocks stay in use, which is logged each time
        that `cache.default_deadline_s` has passed.

        Args:
            leases: the leases whose blocks the pass reads or writes.
            event: completes with the pass: a GPU event with `query()`, as PyTorch's and Paddle's,
                or an awaitable, such as the coroutine, task or future of the pass.
            stream: the engine's CUDA stream, in place of an event (see `Lease.commit`).

        Returns:
            The pass, an awaitable, which other calls take as their `event`. Await it, and not the
            future that was given: the cancellation of that wait would cancel the future.

        Raises:
            LeaseEnded: a lease has ended. Nothing was recorded.
            DeviceError: the device has no CUDA streams.
        """
        client, numbers = self._client, []
        client.check_call()
        if not isinstance(leases, list | tuple):
            raise TypeError(f"leases must be a list or tuple of Lease, not {kind(leases)}")
        for lease in leases:
            if not isinstance(lease, Lease):
                raise TypeError(f"leases must be a list or tuple of Lease, not of {kind(lease)}")
            hold = lease._hold
            if hold.client is not client:
                raise ValueError(f"the lease of {hold.request_id!r} is of another cache")
            if hold.ended:
                hold.check_ended()
            numbers.append(hold.id)
        return client.record_pass(frozenset(numbers), event, stream)

    set_num_blocks = sizing.set_num_blocks
    sleep = sleeping.sleep
    wake = sleeping.wake
    step = steps.step
    lookup = look.lookup
    lookup_slices = look.lookup_slices
    free_blocks = look.free_blocks

    async def prefetch(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Fetch the stored blocks of an expected request into the host tier, in the background.

        Args:
            tokens: as in `acquire`.
            extra_keys: as in `acquire`.
            salt: as in `acquire`.
            lora: as in `acquire`.
            deadline: seconds from now for the fetches.

        Returns:
            Blocks that the device lacks and a lower tier has, or may have if only a query can tell.
            0 without a host tier to keep them.

        Raises:
            StoreUnsupported: the store moves device memory itself (AttentionStore).
            NumBlocksUnset: the number of device blocks is not set yet.
        """
        at = self._client.deadline(deadline)
        scope = request_scope(salt, lora)
        root = self.system.roots.root(scope)
        path, media = request_path(self.block_size, root, tokens, extra_keys)
        if self.system.device_store is not None:
            raise StoreUnsupported("there is no prefetch: this store reads into device memory only")
        if not self.config.host.slots:
            return 0
        stored = await look.count_stored(self, path, scope, media)
        return int((await self._client.ask(Prefetch(path, at, scope, stored), at)).count)

    # -- the whole cache

    clear = tenants.clear
    set_quota = tenants.set_quota
    unpin = tenants.unpin

    async def pause(self, *, deadline: float | None = None) -> None:
        """Stop admission. Returns when no transfer is in flight. Requests acquired from now on wait
        for `resume`."""
        await self._client.ask(Pause(), self._client.deadline(deadline))

    async def resume(self, *, deadline: float | None = None) -> None:
        """Admit again, first the requests that waited."""
        await self._client.ask(Resume(), self._client.deadline(deadline))

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """Separate later requests from the blocks cached so far, for example when the weights
        change. Requests admitted from now on, waiting ones included, share blocks only within
        `namespace`. Earlier leases keep theirs: finish or preempt them before the weights change.
        `statistics().prefix.leases` is 0 then: it counts a lease from its grant on, which is before
        `acquire` returns. Indexes are sent blocks of other namespaces as gone, and of this one as
        resident."""
        at = self._client.deadline(deadline)
        await self._client.ask(SetNamespace(check_text("namespace", namespace)), at)

    wait_idle = waits.wait_idle
    wait_flushed = waits.wait_flushed

    async def resync(self, sink: str, *, deadline: float | None = None) -> None:
        """Send a sink the complete state again, for an index that lost its own. Without
        `Sink.repeats` the sink is reset first.

        Args:
            sink: its name.
            deadline: seconds until the sink has acknowledged. The resync continues after it.

        Raises:
            ValueError: there is no such sink.
            SinkError: the notifier is switched off.
        """
        at = self._client.deadline(deadline)
        self._sink_names((check_text("sink", sink),))
        await self.system.notifier.ask(Resync(sink), deadline=at)

    # -- inspection

    def statistics(self) -> CacheStatistics:
        """The statistics of every actor, as of now."""
        self._client.check_thread()
        return collect(self.system)

    def tenants(self) -> Tenants:
        """Statistics by salt, as of now: of the salts with a named quota, of the first 1,000
        others, and of all other requests together."""
        self._client.check_thread()
        return collect_tenants(self.system)

    def health(self) -> Health:
        """Whether the cache works, is degraded (works without a sink, the notifier, a store or a
        rank), or has failed, with reasons. Cheap."""
        self._client.check_thread()
        return health(self.system)

    def check(self) -> list[str]:
        """The violated invariants, one line each. Each actor's state is checked (pools add up, no
        slot is used twice, every reference has a lease). When the cache is idle the actors are also
        compared with each other. Blocks the loop for microseconds a block: see `check_slices`."""
        self._client.check_thread()
        return invariants(self.system)

    async def check_slices(self) -> list[str]:
        """`check` for production, in steps of about a millisecond between which other tasks run.
        Actors are compared with each other only if the cache is idle during the whole call."""
        self._client.check_loop()
        return await invariants_in_slices(self.system)

    async def count_divergent_blocks_slices(self, sinks: Collection[str] | None = None) -> int:
        """`count_divergent_blocks` in short steps. Changes during the call may count."""
        self._client.check_loop()
        return await divergence_in_slices(self.system, self._sink_names(sinks))

    def count_divergent_blocks(self, sinks: Collection[str] | None = None) -> int:
        """Blocks on which the view of one of `sinks` (all if None) and the tiers differ. 0 after
        `wait_flushed`."""
        self._client.check_thread()
        tiers, names = residency(self.system), self._sink_names(sinks)
        return self.system.notifier_actor.sinks.divergence(tiers, names)

    def close(self) -> None:
        """Refuse new work. `open` calls it at the end of its block. No effect in a forked child."""
        if not self.system.forked:
            self._client.check_thread()
            self._client.close()
