"""The public API of the cache: `open` a cache, `acquire` a lease for a request, compute the missing
KV, `commit` and `finish`.

Bad arguments are a TypeError or ValueError that names them, and change nothing. A `deadline` is in
seconds from now, None for `cache.default_deadline_s` of the settings. A missed one raises
DeadlineExceeded. Every method raises CacheClosed once the cache is closed, and WrongLoop outside
its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from types import CoroutineType
from typing import Any, ClassVar, NamedTuple

import anyio
from msgspec.structs import replace

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.sliced import Sliced, finish
from kvactors.actor.uncancelled import ended, retrieve, uncancelled
from kvactors.attention_sdk import gpu_of
from kvactors.call_context import CallContext
from kvactors.capacity import quota_in_blocks
from kvactors.checks import (
    Media,
    check_flag,
    check_int,
    check_names,
    check_optional_text,
    check_seconds,
    check_text,
    kind,
    request_path,
    request_scope,
)
from kvactors.cpu_evictor.messages import EmptyHost
from kvactors.data_plane.engine import NoCopies
from kvactors.data_plane.local import LocalPlane, make_device
from kvactors.data_plane.ranks.plane import RanksPlane
from kvactors.decode_batch import AnyLease, Step, StepCall, Stepped, step_batch
from kvactors.device.arena import bring_in
from kvactors.device.base import Device, DeviceBlocks
from kvactors.device.events import Completion, Pass, Stream
from kvactors.errors import (
    ActorFailed,
    CacheAsleep,
    CacheClosed,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    LayoutError,
    NoRoom,
    NumBlocksUnset,
    Paused,
    SleepUnsupported,
    StoreError,
    StoreUnsupported,
)
from kvactors.flush_notifier.messages import Resync, WaitFlushed
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.from_thread import LoopCaller, blocking, end_stepped, mirrored, threaded
from kvactors.hints import Hints, check_hints
from kvactors.identity import PLAIN, RequestScope
from kvactors.lease import Lease
from kvactors.lifecycle import Opening
from kvactors.lookup import FreeBlocks, PromptHits, count_stored, hits_of
from kvactors.native import Path
from kvactors.observe.health import Health, health
from kvactors.observe.invariants import in_slices, invariants, invariants_in_slices
from kvactors.observe.statistics import (
    CacheStatistics,
    Tenants,
    collect,
    collect_tenants,
    residency,
)
from kvactors.prefix_index.messages import (
    Acquire,
    AcquireResult,
    ChangeShares,
    Clear,
    Pause,
    Prefetch,
    Resume,
    SetNamespace,
    SetQuota,
    Stored,
    Unpin,
)
from kvactors.settings import Config
from kvactors.system import System
from kvactors.types import Tokens

MAX_DEVICE_BLOCKS = 1 << 31
"""As for `device.num_blocks`."""

EMPTIED_BLOCKS = 512
"""Host blocks that a turn evicts."""

AWAKE_LIMIT_S = 10.0
"""Seconds that an index may take to admit requests again."""

LATE_MEMORY = "the memory was not released or taken in time"

log = get_logger()


class Cleared(NamedTuple):
    """The result of a clear.

    Attributes:
        device_blocks: device blocks that it has freed. 0 with `lora`.
        unknown_objects: objects that a clear of a salt has left in the store, because they were
            written before stores kept the salt of each object.
    """

    device_blocks: int
    unknown_objects: int


class KVCache:
    """One open cache, for the loop it was opened on. Other threads use `from_thread`."""

    _LEASE: ClassVar[type[Lease]] = Lease
    _STEP: ClassVar[type[StepCall]] = StepCall

    def __init__(self, system: System) -> None:
        self.system = system
        self.block_size = system.block_size
        self._context = CallContext(system)
        self._leases = self._context.lease_numbers
        self._split_media = system.config.cache.split_media
        self._stated_to = 0  # the incarnation of the notifier that has had the whole state

    def __repr__(self) -> str:
        config, leases = self.config, len(self.system.index_actor.leases)
        state = health(self.system).status if self.system.is_open else "closed"
        return (
            f"<{type(self).__name__} of {config.cache.model!r}: {config.device.num_blocks} device "
            f"blocks of {self.block_size} tokens, {leases} open leases, {state}>"
        )

    @property
    def config(self) -> Config:
        """The settings."""
        return self.system.config

    @property
    def device(self) -> Any:
        """The device blocks."""
        return self.system.plane.device

    @property
    def namespace(self) -> str:
        """The namespace that requests are admitted under (`set_namespace`)."""
        return self.system.roots.namespace

    @property
    def groups(self) -> dict[str, KVCache]:
        """The caches of the groups of layers beside `[layout]`, by name (docs/groups.md). Requests
        are made here: of the caches of groups read `device`, `statistics()` and
        `free_blocks()`."""
        return {}

    @property
    def sinks(self) -> dict[str, Sink]:
        """The flush sinks by name."""
        return self.system.sinks

    @property
    def from_thread(self) -> FromThread:
        """The same calls for other threads: each blocks its thread until the loop has answered."""
        return FromThread(self.system, self._context.loop, self)

    def _sink_names(self, sinks: Collection[str] | None) -> tuple[str, ...] | None:
        names = check_names("sinks", sinks)
        unknown = set(names or ()) - self.sinks.keys()
        if unknown:
            raise ValueError(
                f"there is no sink {min(unknown)!r} (sinks: {', '.join(self.sinks) or 'none'})"
            )
        return names

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
            request_id: a label for messages, traces and statistics. Open leases may share one, as
                forks do. A preempted request that comes again with its id is counted once.
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
        message = self._acquire_message(
            request_id,
            tokens,
            (salt, lora, lora_id),
            extra_keys,
            deadline,
            wait_for_evictions,
            wait_for_room,
            chunk_tokens,
            hints,
        )
        if self.system.index_actor.settings.fetch:
            stored = await self._count_stored(message.path, message.scope, message.media)
            message = replace(message, stored=stored)
        made = self._grant(message)
        return made if isinstance(made, Lease) else await made

    def _acquire_message(
        self,
        request_id: str,
        tokens: Tokens,
        names: tuple[str | None, str | None, int | None],
        extra_keys: Sequence[Media] = (),
        deadline: float | None = None,
        wait_for_evictions: bool = True,
        wait_for_room: bool = False,
        chunk_tokens: int | None = None,
        hints: Hints | None = None,
    ) -> Acquire:
        """Check the arguments of `acquire`. names: salt, lora and lora_id."""
        at = self._context.begin_call(deadline)
        check_text("request_id", request_id)
        scope, (salt, lora, lora_id) = PLAIN, names
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
        lease, room = next(self._leases), wait_for_room
        evictions = wait_for_evictions
        return Acquire(
            lease, request_id, path, at, evictions, scope, media, room, chunk, None, hints
        )

    def _grant(self, message: Acquire) -> Lease | Coroutine[Any, Any, Lease]:
        """Ask the index: the lease, or a coroutine to be awaited in the same step."""
        split = message.media and self._split_media
        sent = replace(message, media=()) if split else message
        entrance = self._context.index.entrance
        try:
            asked = entrance.begin_ask(sent, message.deadline, queued=message.wait_for_room)
        except BaseException as error:
            self._not_granted(message, error)
            raise
        if isinstance(asked, CoroutineType):
            return self._granted_later(message, asked)
        return self._lease_of(message, asked)

    async def _granted_later(
        self, message: Acquire, asked: CoroutineType[Any, Any, AcquireResult]
    ) -> Lease:
        try:
            return self._lease_of(message, await asked)
        except BaseException as error:
            self._not_granted(message, error)
            raise

    def _lease_of(self, message: Acquire, granted: AcquireResult) -> Lease:
        lease, name, path = message.lease, message.request_id, message.path
        return self._LEASE(
            self._context, lease, name, path, granted, message.deadline, message.media
        )

    def _not_granted(self, message: Acquire, error: BaseException) -> None:
        """Without an answer of the index it may have granted the lease."""
        if isinstance(error, NoRoom | Paused):
            return
        self._context.abandon(message.lease)
        if isinstance(error, ActorFailed):
            self._context.raise_if_closed(error)

    def record_pass(
        self,
        leases: Sequence[AnyLease],
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
        context, numbers = self._context, []
        context.check_call()
        if not isinstance(leases, list | tuple):
            raise TypeError(f"leases must be a list or tuple of Lease, not {kind(leases)}")
        for lease in leases:
            if not isinstance(lease, Lease):
                raise TypeError(f"leases must be a list or tuple of Lease, not of {kind(lease)}")
            handle = lease._handle
            if handle.context is not context:
                raise ValueError(f"the lease of {handle.request_id!r} is of another cache")
            if handle.ended:
                handle.check_ended()
            numbers.append(handle.id)
        return context.record_pass(frozenset(numbers), event, stream)

    async def step(
        self,
        steps: Sequence[Step],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> list[Stepped]:
        """Extend and commit many leases with one message, as one decode step needs it.

        Blocks that are free, or whose eviction needs no copy, are taken at once. A lease that needs
        more does not hold up the others: separate messages commit and extend it. During the call
        every other change of its leases is LeaseBusy. After a cancellation the leases whose step
        happened have ended.

        Args:
            steps: one per lease. A lease occurs once. All arguments are copied at the call.
            event: completes when the device has computed the tokens that are committed. Nothing
                happens before. See `Lease.commit`.
            stream: the engine's CUDA stream, in place of an event. See `Lease.commit`.
            deadline: seconds from now, for the event as well.

        Returns:
            An outcome per step, in the same order. An error in it concerns its lease alone.

        Raises:
            DeviceError: the event has failed, or the device has no CUDA streams. Nothing changed.
        """
        at = self._context.begin_call(deadline)
        return await step_batch(self._context, steps, event, stream, at, self._STEP)

    def lookup(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
    ) -> PromptHits:
        """Count the cached blocks of a prompt, as `acquire` would find them now.

        Takes nothing: no block is held, evicted or marked as used, and the next call may find
        another count. After the copy of the tokens it takes some tens of nanoseconds a block that
        is cached on the device or the host, and a few hundred a block that a store has. It ends at
        the first block that no tier has. `tokens`, `extra_keys`, `salt` and `lora` are those of
        `acquire`.

        Raises:
            NumBlocksUnset: the number of device blocks is not set yet.
        """
        return finish(self._count_hits(tokens, extra_keys, salt, lora))

    async def lookup_slices(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
    ) -> PromptHits:
        """See `lookup`: the same in steps of a fraction of a millisecond between which other tasks
        run, for prompts of which a store may have 10,000 blocks and more."""
        return await in_slices(self._count_hits(tokens, extra_keys, salt, lora))

    def _count_hits(
        self, tokens: Tokens, extra_keys: Any, salt: str | None, lora: str | None
    ) -> Sliced[PromptHits]:
        """Check the arguments of a look-up, and begin it."""
        path, scope, media = self._lookup_path(tokens, extra_keys, salt, lora)
        return hits_of(self.system, path, scope.salt, () if self._split_media else media)

    def _lookup_path(
        self,
        tokens: Tokens,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
    ) -> tuple[Path, RequestScope, tuple[tuple[int, int], ...]]:
        self._context.check()
        system = self.system
        if system.index_asleep:
            raise CacheAsleep
        if not system.sized:
            raise NumBlocksUnset
        scope = request_scope(salt, lora)
        path, media = request_path(self.block_size, system.roots.root(scope), tokens, extra_keys)
        return path, scope, media

    async def _count_stored(
        self, path: Path, scope: RequestScope, media: tuple[tuple[int, int], ...]
    ) -> Stored | None:
        """As `lookup.count_stored`, before a request."""
        stored = await count_stored(self.system, path, scope, () if self._split_media else media)
        self._context.check_call()  # another task may have closed the cache between two steps
        return stored

    def free_blocks(self) -> FreeBlocks:
        """The device blocks that a request could have now, in about a microsecond. None, before the
        number of device blocks is set."""
        self._context.check()
        if self.system.index_asleep:
            raise CacheAsleep
        core = self.system.index_actor
        index = core.index
        being_freed = max(0, index.unpromised)
        waiting = len(core.queue.waiting) + len(core.queue.acquires)
        return FreeBlocks(index.pool.total, index.free, index.evictable(), being_freed, waiting)

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
        `tokens`, `extra_keys`, `salt` and `lora` are those of `acquire`. The `deadline` is that of
        the fetches.

        Returns:
            Blocks that the device lacks and a lower tier has, or may have if only a query can tell.
            0 without a host tier to keep them.

        Raises:
            StoreUnsupported: the store moves device memory itself (AttentionStore).
            NumBlocksUnset: the number of device blocks is not set yet.
        """
        at = self._context.begin_call(deadline)
        scope = request_scope(salt, lora)
        root = self.system.roots.root(scope)
        path, media = request_path(self.block_size, root, tokens, extra_keys)
        if self.system.device_store is not None:
            raise StoreUnsupported("there is no prefetch: this store reads into device memory only")
        if not self.config.host.slots:
            return 0
        return await self._prefetch(path, scope, media, at)

    async def _prefetch(
        self, path: Path, scope: RequestScope, media: tuple[tuple[int, int], ...], at: float
    ) -> int:
        stored = await self._count_stored(path, scope, media)
        return int((await self._context.ask(Prefetch(path, at, scope, stored), at)).count)

    # -- the whole cache

    async def clear(
        self,
        *,
        storage: bool = False,
        erase: bool = False,
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> Cleared:
        """Drop every cached block. Leases in use keep theirs, which cannot be hit any more.

        Args:
            storage: clear the store as well.
            erase: overwrite the bytes of every object that has left the store, with `storage` (see
                docs/how-to/erase_a_tenant.md).
            salt: drop only the blocks of requests with this salt, under every namespace and
                adapter. None: all blocks.
            lora: drop only the blocks of requests with this adapter, under every namespace and
                salt, because its weights are others now. Later requests find none of them in any
                tier, and indexes are sent them as gone. Their memory is freed as other blocks need
                it. A new process finds stored blocks of the name again: see
                docs/how-to/share_a_cache.md.

        Returns:
            The blocks that the call has freed, and the objects that it has left.

        Raises:
            ValueError: salt and lora are both given, or erase without storage.
            StoreUnsupported: the store cannot do it. No tier was cleared.
            StoreError: objects from before may still be found, or bytes were not overwritten. Call
                it again.
        """
        at = self._context.begin_call(deadline)
        check_optional_text("salt", salt)
        if check_optional_text("lora", lora) is not None and salt is not None:
            raise ValueError("salt and lora are given: clear one after the other")
        check_flag("storage", storage)
        if check_flag("erase", erase) and not storage:
            raise ValueError(
                "erase=True overwrites objects of the store: give storage=True as well"
            )
        if storage:
            self._check_clear(salt, lora, erase=erase)
        done = await self._context.ask(Clear(storage, salt, lora), at)
        store = self.system.store
        if erase and store is not None:
            left = await store.wipe(lambda: now() >= at or not self.system.is_open)
            if left:
                self._context.check_call()
                raise StoreError(
                    "the store was cleared, and bytes of objects that have left it remain: "
                    f"{left}. Call it again"
                )
        return Cleared(done.count, done.unknown)

    def _check_clear(self, salt: str | None, lora: str | None, *, erase: bool) -> None:
        """StoreUnsupported if the store cannot carry out such a clear."""
        backend, store = self.config.storage.backend, self.system.store
        if self.system.device_store is not None and salt is None:  # it has no blocks under a salt
            raise StoreUnsupported(
                f"storage.backend {backend!r} has no call that removes blocks, "
                "so nothing was cleared: clear without "
                "storage=True, and set_namespace() or another attention_store.model_version keeps "
                "what it holds from being hit"
            )
        if lora is not None and store is not None:
            raise StoreUnsupported(
                f"storage.backend {backend!r} does not have the adapters of its objects, so it "
                "cannot remove those of one, and nothing was cleared: clear without storage=True, "
                "or the whole store without lora"
            )
        if salt is not None and store is not None and store.shares is None:
            raise StoreUnsupported(
                f"storage.backend {backend!r} does not have the salts of its objects here (a file "
                "store of one process that may write has them), so nothing was cleared. Its "
                "objects of this salt stay, and only requests with this salt hit them: clear "
                "without storage=True and give the tenant another salt, or clear the whole store "
                "without salt"
            )
        if erase and store is not None and not getattr(store.inner, "wipes", False):
            raise StoreUnsupported(
                f"storage.backend {backend!r} does not overwrite objects that have left it, so "
                "nothing was cleared: clear without erase=True"
            )

    async def set_quota(
        self,
        salt: str,
        *,
        device: int | str | None = None,
        host: int | str | None = None,
        storage: int | str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Change the most resident blocks of a salt, beyond which its own blocks are evicted first.
        No block leaves at once.

        Args:
            salt: as in `acquire`.
            device: device blocks, or bytes such as "8 GiB". None: no limit. A quota without limits
                ends, with the counters of the salt, unless the settings have limits for all salts.
            host: as `device`, in the host tier.
            storage: as `device`, in the store. Objects that were written before stores kept the
                salt of each object count to no salt.

        Raises:
            ValueError: a size is malformed, or holds no block.
            StoreUnsupported: the store cannot keep a quota. Nothing has changed.
        """
        at = self._context.begin_call(deadline)
        check_text("salt", salt)
        block_bytes = self.system.layout.block_bytes
        for name, size in (("device", device), ("host", host), ("storage", storage)):
            if size is not None and not isinstance(size, str):
                check_int(name, size, 1, 1 << 31)
        try:
            quota = quota_in_blocks(
                "set_quota", (device, host, storage), block_bytes, self.system.object_bytes
            )
        except ConfigError as error:
            raise ValueError(str(error)) from None
        store = self.system.store
        if storage is not None and (store is None or store.shares is None):
            raise StoreUnsupported(
                f"storage.backend {self.config.storage.backend!r} keeps no quota of a salt, and "
                "nothing has changed: storage.backend = 'file' in one rank keeps it"
            )
        await self._context.ask(ChangeShares(SetQuota(salt, quota)), at)

    async def unpin(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """End the pin of exactly the full blocks of `tokens`: the prompt of the request that pinned
        them, with its output if the pin was a hint of `Lease.finish`. They are evicted like others
        from now on. `extra_keys`, `salt` and `lora` are those of `acquire`.

        Returns:
            The blocks, 0 if they were not pinned as one path.
        """
        at = self._context.begin_call(deadline)
        scope = request_scope(salt, lora)
        path, _ = request_path(self.block_size, self.system.roots.root(scope), tokens, extra_keys)
        return int((await self._context.ask(ChangeShares(Unpin(path, scope)), at)).count)

    async def pause(self, *, deadline: float | None = None) -> None:
        """Stop admission. Returns when no transfer is in flight. Requests acquired from now on wait
        for `resume`."""
        await self._context.ask(Pause(), self._context.begin_call(deadline))

    async def resume(self, *, deadline: float | None = None) -> None:
        """Admit again, first the requests that waited."""
        await self._context.ask(Resume(), self._context.begin_call(deadline))

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """Separate later requests from the blocks cached so far, for example when the weights
        change. Requests admitted from now on, waiting ones included, share blocks only within
        `namespace`. Earlier leases keep theirs: finish or preempt them before the weights change.
        `statistics().prefix.leases` is 0 then: it counts a lease from its grant on, which is before
        `acquire` returns. Indexes are sent blocks of other namespaces as gone, and of this one as
        resident."""
        at = self._context.begin_call(deadline)
        await self._context.ask(SetNamespace(check_text("namespace", namespace)), at)

    async def wait_idle(self, deadline: float = 30.0) -> None:
        """Return when nothing is in flight, or raise DeadlineExceeded."""
        self._context.check()
        seconds = check_seconds("deadline", deadline)
        with anyio.move_on_after(seconds) as scope:
            await asyncio.sleep(0)  # callbacks that finalisers scheduled run first
            await self.system.in_flight.wait_idle()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"{self.system.in_flight.count} messages or jobs are in flight after {seconds} s"
            )

    async def wait_flushed(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """Return when every sink's view equals the tiers.

        Args:
            at_rest: first wait until the cache is idle. Without it, under load, the barrier covers
                residency as of this call: later changes, transfers now in flight included, may or
                may not have been delivered. The first wait after a failure of the notifier is one
                at rest in any case.
            sinks: names of the sinks to wait for, all if None. ValueError for an unknown one.
        """
        at = self._context.begin_call(deadline)
        check_flag("at_rest", at_rest)
        names = self._sink_names(sinks)
        notifier = self.system.notifier
        while True:
            # after a restart the notifier's ledger is empty until the other actors have filled it
            if at_rest or notifier.incarnation != self._stated_to:
                await self.wait_idle(max(at - now(), 1e-9))
                self._stated_to = notifier.incarnation
            incarnation = self._stated_to
            with anyio.CancelScope(deadline=at) as scope:
                for actor in self.system.supervisor.actors():
                    await actor.sent()
            if scope.cancelled_caught:
                raise DeadlineExceeded(
                    f"the actors' messages to the notifier were not taken in {deadline} s"
                )
            await notifier.ask(WaitFlushed(names), deadline=at)
            if notifier.incarnation == incarnation:
                return

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
        at = self._context.begin_call(deadline)
        self._sink_names((check_text("sink", sink),))
        await self.system.notifier.ask(Resync(sink), deadline=at)

    # -- memory

    async def set_num_blocks(
        self, num_blocks: int, *, device: Device | None = None, deadline: float | None = None
    ) -> None:
        """Set the number of device blocks of a cache that was opened with `device.num_blocks` 0.

        Until then `acquire`, `prefetch` and `lookup` raise NumBlocksUnset, and `health` reports the
        device. The number is set once. A call that raises changes nothing and can be repeated.

        Args:
            num_blocks: device blocks, at least 1. With ranks: of every rank. They are admitted from
                now on, and the call waits until all have joined.
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
        at = self._context.begin_call(deadline)
        check_int("num_blocks", num_blocks, 1, MAX_DEVICE_BLOCKS)
        if device is not None and not isinstance(device, Device):
            raise TypeError(f"device must be a Device, not {kind(device)}")
        if self.system.sized:
            raise ConfigError(
                f"device.num_blocks is {self.device.num_blocks} already, and is set once"
            )
        if self._changes_memory:
            raise ConfigError("device.num_blocks is being set by another call")
        config = self._config_with(int(num_blocks), device)
        late = "the device did not open in time"
        await self._change_memory(self._set_num_blocks(config, device), at, late)

    def _config_with(self, num_blocks: int, device: Device | None) -> Config:
        """The settings with the number. Raises for a device that does not fit them."""
        config = self.config
        if device is not None:
            if config.ranks.count > 1:
                raise ConfigError("with ranks.count above 1, devices belong to the ranks")
            if device.num_blocks != num_blocks:
                raise ConfigError(f"num_blocks is {num_blocks}, the device has {device.num_blocks}")
            if gpu_of(config, device) != gpu_of(config, None):
                raise ConfigError(
                    f"the device is of kind {device.kind!r}, and [device] names "
                    f"{config.device.kind!r}: name its kind and number there, so that the cache is "
                    "opened for it"
                )
            if device.layout.fingerprint != self.system.layout.fingerprint:
                raise LayoutError(
                    "the device has another layout than the cache was opened for: describe it in "
                    "[layout]"
                )
        return replace(config, device=replace(config.device, num_blocks=num_blocks))

    async def _set_num_blocks(self, config: Config, device: Device | None) -> None:
        """Open the device, and inform the actors in the same step."""
        plane = self.system.plane
        if isinstance(plane, RanksPlane):
            await plane.set_num_blocks(config.device.num_blocks)
        else:
            await self._open_device(plane, config, device)
        self.system.config = config
        self.system.blocks_set()

    async def _open_device(
        self, plane: LocalPlane, config: Config, device: Device | None, *, arena: bool = False
    ) -> None:
        """Open a device, one of the settings if None is given, and its copy engine. arena: whether
        host memory is taken first."""
        made = make_device(config.device, self.system.layout) if device is None else device
        try:
            if arena:
                await bring_in(plane.arena.fresh, inline=plane.inline)
            if device is None:
                await bring_in(made.fresh, inline=plane.inline)
            engine = plane.make_engine(made)
            limit = config.actors.open_timeout_s
            opening = Opening(limit, self.system.shutdown, ends_cache=False)
            try:
                await opening.step("copy engine", engine.open, DeviceError)
            except BaseException:
                await uncancelled(engine.close())
                raise
        except BaseException:
            if device is None and not plane.arena.kept:
                made.close()
            if arena and not plane.arena.kept:
                plane.arena.give_back()
            raise
        plane.set_device(made, engine, owned=device is None)

    async def _change_memory(self, work: Coroutine[Any, Any, None], at: float, late: str) -> None:
        """Run a change of the memory, the only one at this moment. If the deadline passes or the
        caller is cancelled, the change is cancelled, and this returns when the state is defined.
        late: text of the error after the deadline."""
        loop = asyncio.get_running_loop()
        task = self.system.sizing = loop.create_task(work, name="kvactors memory")
        task.add_done_callback(retrieve)
        try:
            await asyncio.wait((task,), timeout=max(0.0, at - loop.time()))
        finally:
            if not task.done():
                task.cancel()
                await ended(task)
        if task.cancelled():
            if self.system.shutdown.begun:
                raise CacheClosed("the cache was closed during this call")
            raise DeadlineExceeded(late)
        task.result()

    async def sleep(self, level: int = 1, *, deadline: float | None = None) -> None:
        """Release device memory, and at level 2 host memory, until `wake`.

        The blocks on the device are evicted as for a request: the host tier keeps a copy as far as
        it has capacity. At level 2 the host tier is emptied too, written to storage if the write
        policy is `write_back`. Sinks are sent each removal. Then every call that needs the tiers
        raises CacheAsleep. Statistics, health and the end of the cache work. A device that was
        given to the cache is released, so that its owner can free its tensors.

        A call that raises leaves the cache awake, with fewer blocks on the device perhaps.

        Args:
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
        at = self._context.begin_call(deadline)
        check_int("level", level, 1, 2)
        self._check_sleep(level)
        await self._change_memory(self._fall_asleep(level, at), at + AWAKE_LIMIT_S, LATE_MEMORY)

    async def wake(self, device: Device | None = None, *, deadline: float | None = None) -> None:
        """End a `sleep`: take memory again, and admit requests.

        A call that raises leaves the cache asleep, and can be repeated. No effect if the cache is
        awake.

        Args:
            device: the device blocks of the engine, as many as before in the same layout. Required
                if the cache was opened with a device, and else not allowed.

        Raises:
            ConfigError: `device` is missing, or is not allowed, or has another number or kind.
            LayoutError: the device does not match the layout.
            CacheAsleep: a sleep or another wake is in progress.
            DeviceError: there is not enough memory, or the device cannot be used.
            DeadlineExceeded: the device did not open in time.
        """
        at = self._context.begin_call(deadline)
        if device is not None and not isinstance(device, Device):
            raise TypeError(f"device must be a Device, not {kind(device)}")
        self._check_memory()
        if not self.system.asleep:
            return
        self._check_wake(device)
        await self._change_memory(self._wake(device), at, LATE_MEMORY)

    def _check_memory(self) -> None:
        """CacheAsleep while a call changes the memory."""
        if self._changes_memory:
            raise CacheAsleep(
                "a sleep, a wake or set_num_blocks of this cache has not returned yet"
            )

    @property
    def _changes_memory(self) -> bool:
        return self.system.sizing is not None and not self.system.sizing.done()

    def _check_sleep(self, level: int) -> None:
        system = self.system
        self._check_memory()
        if system.asleep:
            raise CacheAsleep
        if not system.sized:
            raise NumBlocksUnset
        if system.ranks is not None:
            raise SleepUnsupported("devices of ranks belong to their processes: close the cache")
        if system.device_store is not None:
            raise SleepUnsupported(
                "attention_store registers device memory until the cache is closed"
            )
        if level > 1 and system.storage.backend == "mooncake":
            raise SleepUnsupported(
                "mooncake registers host memory until the cache is closed: use level 1"
            )

    def _check_wake(self, device: Device | None) -> None:
        before, plane = self.device, self.system.plane
        if isinstance(plane, LocalPlane) and plane.owns_device:
            if device is not None:
                raise ConfigError("the cache makes its device itself: call wake() without one")
            return
        if device is None:
            raise ConfigError("the cache was opened with a device: give wake() its tensors again")
        if (device.num_blocks, device.kind) != (before.num_blocks, before.kind):
            raise ConfigError(
                f"the device has {device.num_blocks} blocks of kind {device.kind!r}, before the "
                f"sleep it had {before.num_blocks} of kind {before.kind!r}"
            )
        if device.layout.fingerprint != before.layout.fingerprint:
            raise LayoutError("the device has another layout than before the sleep")

    async def _fall_asleep(self, level: int, at: float) -> None:
        system = self.system
        system.index_asleep = True
        try:
            await system.index.ask(Pause(asleep=True), deadline=at)
            if level > 1:
                await self._empty_host(at)
            if system.arena.in_use or system.arena.kept:
                raise DeviceError(
                    "a call of the store that has not returned still uses host memory"
                )
        except BaseException:
            await uncancelled(self._admit())
            raise
        await uncancelled(self._release(level))

    async def _empty_host(self, at: float) -> None:
        """Evict every block of the host tier. Blocks that no eviction takes are dropped."""
        evictor = self.system.evictor
        before, left = -1, await evictor.ask(EmptyHost(EMPTIED_BLOCKS), deadline=at)
        while left and left != before:
            before, left = left, await evictor.ask(EmptyHost(EMPTIED_BLOCKS), deadline=at)
        if left and await evictor.ask(EmptyHost(0), deadline=at):
            raise DeviceError("host slots are still in use")

    async def _admit(self) -> None:
        """Admit requests again. A new incarnation of the index does so from its beginning."""
        self.system.index_asleep = False
        try:
            await self.system.index.ask(Resume(awake=True), deadline=now() + AWAKE_LIMIT_S)
        except Exception as error:
            log.warning("the index does not admit requests", error=repr(error))

    async def _release(self, level: int) -> None:
        """Release the memory. Nothing uses it, and from here on the cache sleeps."""
        plane: Any = self.system.plane
        self.system.asleep = level
        engine, device = plane.engine, plane.device
        plane.engine = NoCopies()
        await engine.close()
        plane.device = DeviceBlocks(device.kind, device.layout, device.num_blocks)
        if plane.owns_device and not plane.arena.kept:
            device.close()
        if level > 1 and not plane.arena.kept:
            plane.arena.give_back()
        log.info("cache asleep", level=level)

    async def _wake(self, device: Device | None) -> None:
        system = self.system
        plane: Any = system.plane
        await self._open_device(plane, self.config, device, arena=system.asleep > 1)
        system.asleep = 0
        await uncancelled(self._admit())
        log.info("cache awake")

    # -- inspection

    def statistics(self) -> CacheStatistics:
        """The statistics of every actor, as of now."""
        self._context.check_thread()
        return collect(self.system)

    def tenants(self) -> Tenants:
        """Statistics by salt, as of now: of the salts with a named quota, of the first 1,000
        others, and of all other requests together."""
        self._context.check_thread()
        return collect_tenants(self.system)

    def health(self) -> Health:
        """Whether the cache works, is degraded (works without a sink, the notifier, a store or a
        rank), or has failed, with reasons. Cheap."""
        self._context.check_thread()
        return health(self.system)

    def check(self) -> list[str]:
        """The violated invariants, one line each. Each actor's state is checked (pools add up, no
        slot is used twice, every reference has a lease). When the cache is idle the actors are also
        compared with each other. Blocks the loop for microseconds a block: see `check_slices`."""
        self._context.check_thread()
        return invariants(self.system)

    async def check_slices(self) -> list[str]:
        """`check` for production, in steps of about a millisecond between which other tasks run.
        Actors are compared with each other only if the cache is idle during the whole call."""
        self._context.check_loop()
        return await invariants_in_slices(self.system)

    def count_divergent_blocks(self, sinks: Collection[str] | None = None) -> int:
        """Blocks on which the view of one of `sinks` (all if None) and the tiers differ. 0 after
        `wait_flushed`. Blocks the loop as `check` does."""
        self._context.check_thread()
        tiers, names = residency(self.system), self._sink_names(sinks)
        return self.system.notifier_actor.sinks.divergence(tiers, names)

    def close(self) -> None:
        """Refuse new work. `open` calls it at the end of its block. No effect in a forked child."""
        if not self.system.forked:
            self._context.check_thread()
            self._context.close()


class FromThread(LoopCaller):
    """`KVCache` for threads other than the loop's. Each call blocks its thread until the loop has
    answered, for `deadline` seconds and a margin, and raises the errors of the awaited call.

    Raises:
        CacheClosed: the loop has ended.
        DeadlineExceeded: the loop did not answer in time. The call did not happen, or its lease has
            ended.
        WrongLoop: the call is from the loop's thread.
    """

    block_size: int = mirrored("block_size")
    config: Config = mirrored("config")
    device: Any = mirrored("device")
    sinks: dict[str, Sink] = mirrored("sinks")
    namespace: str = mirrored("namespace")

    @property
    def groups(self) -> dict[str, FromThread]:
        """As `groups` of `KVCache`."""
        found: dict[str, KVCache] = self._target.groups
        return {name: cache.from_thread for name, cache in found.items()}

    acquire = threaded(KVCache.acquire)
    prefetch = blocking(KVCache.prefetch)
    lookup_slices = threaded(KVCache.lookup_slices)
    lookup = lookup_slices
    free_blocks = threaded(KVCache.free_blocks)
    clear = blocking(KVCache.clear)
    set_quota = blocking(KVCache.set_quota)
    unpin = blocking(KVCache.unpin)
    pause = blocking(KVCache.pause)
    resume = blocking(KVCache.resume)
    set_namespace = blocking(KVCache.set_namespace)
    wait_idle = blocking(KVCache.wait_idle)
    wait_flushed = blocking(KVCache.wait_flushed)
    resync = blocking(KVCache.resync)
    set_num_blocks = blocking(KVCache.set_num_blocks)
    sleep = blocking(KVCache.sleep)
    wake = blocking(KVCache.wake)
    statistics = threaded(KVCache.statistics)
    tenants = threaded(KVCache.tenants)
    health = threaded(KVCache.health)
    check = threaded(KVCache.check)
    check_slices = threaded(KVCache.check_slices)
    count_divergent_blocks = threaded(KVCache.count_divergent_blocks)
    step = blocking(KVCache.step, end_stepped)
    record_pass = threaded(KVCache.record_pass)
