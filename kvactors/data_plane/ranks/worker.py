"""A tensor-parallel rank, in the loop of its GPU worker: has its device, arena and store, and
executes the leader's operations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine
from itertools import chain
from typing import Any

import anyio
from msgspec.structs import replace

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.actor.supervisor import LEAST_STEP
from kvactors.actor.uncancelled import ended, uncancelled
from kvactors.attention_sdk import store_identity
from kvactors.capacity import in_blocks
from kvactors.data_plane.base import Direction, Progress
from kvactors.data_plane.local import LocalPlane, make_local_plane
from kvactors.data_plane.ranks.connection import Connection, check_leader, connect
from kvactors.data_plane.ranks.names import pages
from kvactors.data_plane.ranks.protocol import (
    FAILED,
    NOT_MOVED,
    Arrived,
    CopyBlocks,
    Frame,
    Identity,
    MoveDevice,
    Names,
    Ping,
    Pong,
    RankAnswer,
    Refused,
    SendNames,
    StoreObjects,
    Welcome,
)
from kvactors.device.base import Device
from kvactors.errors import ConfigError, LayoutError, RankError, StoreError
from kvactors.identity import StoreIdentity
from kvactors.lifecycle import STOP, Opening, Shutdown
from kvactors.settings import Config, StorageConfig
from kvactors.settings.ranks import Secret
from kvactors.storage.backend import Backend, SlotViews
from kvactors.storage.factory import object_layout
from kvactors.storage.messages import Outcome
from kvactors.types import HASH_BYTES, join_hashes, split_hashes

log = get_logger()

RETRY_LEAST, RETRY_MOST = 0.02, 0.5
"""Seconds between attempts to reach the leader. Doubled each time."""

CONNECT_LIMIT = 10.0
"""Seconds one attempt to connect may take."""


async def serve_rank(
    endpoint: str,
    device: Device,
    *,
    rank: int,
    ranks: int,
    config: Config | None = None,
    backend: Backend | None = None,
    admitted: Callable[[], None] | None = None,
    inline_copies: bool = False,
) -> None:
    """Move this rank's share of every block until cancelled, for the cache whose leader listens at
    `endpoint`.

    A leader that does not listen yet, or stops, is tried again until it is there. Cancelled, by
    asyncio or anyio, at any moment and more than once, it ends the copies in flight and closes
    everything before it returns.

    Args:
        endpoint: unix:///path, tcp://host:port, or memory://name in the same loop.
        device: this rank's, with `device.num_blocks` alike in all ranks.
        rank: this rank's number, below `ranks`.
        ranks: how many ranks there are.
        config: the leader's. It gives the arena (`host`), the store (`storage`, whose objects
            belong to this rank alone, with AttentionStore this rank's shard) and the secret
            (`ranks.secret`, or the variable KVACTORS_RANKS_SECRET).
        backend: in place of the config's.
        admitted: called each time the leader has admitted this rank.
        inline_copies: copy in the loop's thread, for loops of virtual time (with a memory://
            endpoint).

    Raises:
        ConfigError: a setting is wrong, or a tcp endpoint has no secret.
        LayoutError: the device does not fit the layout.
        StoreError: the store cannot be opened, or not within `actors.open_timeout_s` seconds.
        DeviceError: the copy engine cannot be opened, or not within `actors.open_timeout_s`
            seconds.
        SdkError: AttentionStore's SDK is not there, or refused a call.
        DeadlineExceeded: AttentionStore is not ready in `attention_store.ready_timeout_s` seconds.
        RankError: the leader refuses this rank (the message names the values that differ), does
            not have the same secret, or another process already serves this number and answers.
    """
    config = Config.from_env(base=config)
    if not 0 <= rank < ranks:
        raise ConfigError(f"there is no rank {rank} of {ranks}")
    if device.layout.block_size != config.cache.block_size:
        raise LayoutError(
            f"the device's blocks hold {device.layout.block_size} tokens, not "
            f"{config.cache.block_size}"
        )
    shared = replace(config.ranks, count=ranks, endpoint=endpoint).with_secret(os.environ)
    shared.check_exposure()
    storage = (
        StorageConfig(backend="none")
        if config.flush.flush_only
        else replace(config.storage, rank=rank, ranks=ranks)
    )
    given = None if config.flush.flush_only else backend
    config = in_blocks(config, device.layout, storage, given)
    plane = make_local_plane(
        config, storage, device.layout, device, backend, shard=(rank, ranks), inline=inline_copies
    )
    stored = object_layout(storage, device.layout)
    identity = store_identity(config, storage, stored, rank, ranks)
    shutdown = Shutdown(config.actors.drain_timeout_s, plane.arena)
    one = _Serving(identity, storage, plane, Secret(shared.secret), shutdown)
    opening = Opening(config.actors.open_timeout_s, shutdown)
    work = one.run(endpoint, admitted or (lambda: None), opening)
    task = asyncio.get_running_loop().create_task(work, name=f"kvactors rank {rank}")
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            shutdown.begin()
            task.cancel()
            await ended(task)
    task.result()


class _Refuse(Exception):
    """The leader sent an invalid request."""


class _Serving:
    def __init__(
        self,
        identity: StoreIdentity,
        storage: StorageConfig,
        plane: LocalPlane,
        secret: Secret,
        shutdown: Shutdown,
    ) -> None:
        self.identity = identity
        self.storage = storage
        self.shutdown = shutdown
        self.rank = identity.rank
        self.plane = plane
        self.secret = secret
        self._warned = ""
        self._without_checksum = 0  # misses in earlier answers
        self._new_without_checksum()

    async def run(self, endpoint: str, admitted: Callable[[], None], opening: Opening) -> None:
        """Open the data plane, serve, and close it, each step to its end and all of them within
        the shutdown's limit."""
        async with self.plane.opened(opening):
            try:
                await self.serve(endpoint, admitted)
            finally:
                self.shutdown.begin()

    async def serve(self, endpoint: str, admitted: Callable[[], None]) -> None:
        """Connect, join, and execute the leader's operations. After a lost connection finish them,
        and connect again."""
        pause = RETRY_LEAST
        while True:
            connection = await self._connect(endpoint)
            if connection is None:
                await asyncio.sleep(pause)
                pause = min(RETRY_MOST, 2 * pause)
                continue
            try:
                if await self._enter(connection):
                    pause = RETRY_LEAST
                    admitted()
                    await self._work(connection)
            finally:
                connection.close()
            await asyncio.sleep(pause)
            pause = min(RETRY_MOST, 2 * pause)

    async def _connect(self, endpoint: str) -> Connection | None:
        connection = None
        try:
            with anyio.move_on_after(CONNECT_LIMIT):
                connection = await connect(endpoint)
        except PermissionError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning(
                    "endpoint of the leader is not usable", rank=self.rank, error=str(error)
                )
        except OSError:
            pass
        return connection

    async def _enter(self, connection: Connection) -> bool:
        """Whether the leader has admitted this rank; False if the connection was lost before that.
        RankError if it refuses."""
        if not await check_leader(connection, self.secret):
            return False
        device, store, mine = self.plane.device, self.plane.backend, self.identity
        connection.send(
            Identity(
                self.rank,
                mine.ranks,
                mine.model,
                mine.namespace,
                self.storage.backend,
                mine.fingerprint,
                device.num_blocks,
                self.plane.arena.num_slots,
                0 if store is None else store.count(),
                0 if store is None else store.generation,
            )
        )
        names = pages(chain.from_iterable(() if store is None else store.key_slices()))
        while (message := await connection.receive()) is not None:
            if isinstance(message, Refused):
                raise RankError(f"the leader refuses: {message.reason}")
            if isinstance(message, Welcome):
                return True
            if isinstance(message, Ping):
                connection.send(Pong())
            elif isinstance(message, SendNames):
                connection.send(Names(*next(names)))
            else:
                log.error(
                    "unexpected message from the leader",
                    rank=self.rank,
                    message=type(message).__name__,
                )
                return False
        return False

    async def _work(self, connection: Connection) -> None:
        """Execute the leader's operations until the connection is lost and all of them have ended.
        An idle rank waits for the leader's next message without limit. The end of the connection
        ends that wait."""
        tasks: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("operation failed", rank=self.rank, error=described(error))
                # without an answer the leader would count this rank as silent permanently
                connection.close()

        try:
            while (message := await connection.receive()) is not None:
                try:
                    work = self._work_of(connection, message)
                except _Refuse as refusal:
                    log.error(
                        "request of the leader that cannot be carried out",
                        rank=self.rank,
                        reason=str(refusal),
                    )
                    connection.close()
                    break
                if work is not None:
                    task = asyncio.get_running_loop().create_task(self._answer(connection, work))
                    tasks.add(task)
                    task.add_done_callback(ended)
            await self._all_ended(tasks)
        finally:
            if tasks:
                for task in tasks:
                    task.cancel()
                await uncancelled(self._give_up(tasks))

    def _work_of(
        self, connection: Connection, message: Frame
    ) -> Coroutine[Any, Any, RankAnswer] | None:
        """The work that a message requests. None if it is answered already."""
        if isinstance(message, CopyBlocks):
            self._check_copy(message)

            def arrived(layers: int) -> None:
                connection.send(Arrived(message.op, layers))

            return self._copy(message, arrived if message.layerwise else None)
        if isinstance(message, StoreObjects):
            self._check_store(message)
            return self._store(message)
        if isinstance(message, MoveDevice):
            self._check_move(message)
            return self._move(message)
        if not isinstance(message, Ping):
            raise _Refuse(f"unexpected message {type(message).__name__}")
        connection.send(Pong())
        return None

    @staticmethod
    async def _answer(connection: Connection, work: Coroutine[Any, Any, RankAnswer]) -> None:
        connection.send(await work)

    async def _all_ended(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for the operations in flight: the leader uses their slots and blocks again once this
        rank has connected. Logged when it takes long."""
        if tasks:
            await asyncio.wait(tasks, timeout=self.storage.timeout_s)
        if tasks:
            log.error(
                "operations in flight keep this rank from connecting again",
                rank=self.rank,
                operations=len(tasks),
            )
            await asyncio.wait(tasks)

    async def _give_up(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for operations that were cancelled, until the shutdown's deadline."""
        self.shutdown.begin()
        await asyncio.wait(tasks, timeout=self.shutdown.left(STOP) + LEAST_STEP)
        if tasks:
            self.plane.arena.keep()
            log.error(
                "operations did not end before the shutdown's deadline",
                rank=self.rank,
                operations=len(tasks),
            )

    # -- what the leader may request

    def _check_ids(self, kind: str, ids: Collection[int], count: int) -> None:
        if min(ids, default=0) < 0 or max(ids, default=-1) >= count:
            raise _Refuse(f"{kind}s {min(ids)} to {max(ids)}, there are {count}")

    def _check_copy(self, message: CopyBlocks) -> None:
        device, slots, blocks = self.plane.device, message.slots, message.blocks
        if len(slots) != len(blocks):
            raise _Refuse(f"{len(slots)} slots for {len(blocks)} blocks")
        self._check_ids("block", blocks, device.num_blocks)
        if message.direction is not Direction.WITHIN:
            self._check_ids("slot", slots, self.plane.arena.num_slots)
            return
        self._check_ids("block", slots, device.num_blocks)
        if len({*blocks, *slots}) < len(set(blocks)) + len(slots):
            raise _Refuse(f"copies of blocks {blocks} to {slots}, which overlap")

    def _check_store(self, message: StoreObjects) -> None:
        if len(message.keys) % HASH_BYTES:
            raise _Refuse(f"{len(message.keys)} bytes of names")
        if message.kind in ("read", "write"):
            if len(message.slots) != len(message.keys) // HASH_BYTES:
                raise _Refuse(f"{len(message.slots)} slots for {len(message.keys)} bytes of names")
            self._check_ids("slot", message.slots, self.plane.arena.num_slots)
        if len(message.lineages) not in (0, len(message.slots)):
            raise _Refuse(f"{len(message.lineages)} lineages for {len(message.slots)} slots")

    def _check_move(self, message: MoveDevice) -> None:
        blocks, tokens = message.blocks, len(message.tokens)
        self._check_ids("block", blocks, self.plane.device.num_blocks)
        if len(set(blocks)) < len(blocks):
            raise _Refuse(f"{len(blocks)} blocks, {len(set(blocks))} different ones")
        block_bytes = 4 * self.plane.device.layout.block_size
        if (
            message.start < 0
            or (message.start + len(blocks)) * block_bytes > tokens
            or tokens % block_bytes
        ):
            raise _Refuse(
                f"{len(blocks)} blocks from block {message.start} on, of a path of {tokens} bytes "
                "of tokens"
            )

    # -- the leader's operations

    async def _copy(self, message: CopyBlocks, progress: Progress | None) -> RankAnswer:
        outcomes = bytearray(len(message.blocks))
        try:
            failed = await self.plane.copy_pairs(
                message.direction, message.blocks, message.slots, progress
            )
        except Exception as error:
            log.error("copy failed", rank=self.rank, error=repr(error))
            failed = tuple(range(len(outcomes)))
        for j in failed:
            outcomes[j] = 1
        return RankAnswer(message.op, bytes(outcomes))

    async def _move(self, message: MoveDevice) -> RankAnswer:
        """The store does not access its blocks after this returns."""
        store, count, good, failed = self.plane.device_store, len(message.blocks), 0, True
        if store is not None:
            before = store.unavailable
            move = store.fetch if message.kind == "fetch" else store.save
            try:
                good = await move(message.tokens, message.start, message.blocks, message.seconds)
                failed = store.unavailable > before
            except Exception as error:
                kind = message.kind
                log.error("device store failed", rank=self.rank, call=kind, error=repr(error))
        rest = bytes([FAILED if failed else NOT_MOVED]) * (count - good)
        return RankAnswer(message.op, bytes(good) + rest)

    async def _store(self, message: StoreObjects) -> RankAnswer:
        """A failure of the store is an outcome of the answer."""
        if message.kind in ("begin_paths", "paths"):
            return await self._next_paths(message)
        keys = split_hashes(message.keys)
        try:
            outcomes, gone = await self._carry_out(message, keys)
        except StoreError as error:
            log.error("clear failed", rank=self.rank, error=str(error))
            count = 1 if message.kind == "clear" else len(keys)
            outcomes, gone = bytes([Outcome.UNAVAILABLE]) * count, []
        new = self._new_without_checksum()
        return RankAnswer(message.op, outcomes, join_hashes(gone), without_checksum=new)

    def _new_without_checksum(self) -> int:
        counters = getattr(self.plane.backend, "counters", None)  # of other packages: maybe none
        before = self._without_checksum
        self._without_checksum = getattr(counters, "without_checksum", before)
        return self._without_checksum - before

    async def _next_paths(self, message: StoreObjects) -> RankAnswer:
        """The next parts of the paths that the objects form; MISS at the end."""
        store, parts = self.plane.store, None
        if store is not None:
            if message.kind == "begin_paths":
                store.begin_paths()
            parts = await store.next_paths(message.most)
        outcome = Outcome.MISS if parts is None else Outcome.OK
        return RankAnswer(message.op, bytes([outcome]), paths=tuple(parts or ()))

    async def _carry_out(
        self, message: StoreObjects, keys: list[bytes]
    ) -> tuple[bytes, list[bytes]]:
        """Outcomes, and keys that the store does not hold any more."""
        store, views = self.plane.store, SlotViews(self.plane.arena, message.slots)
        until = now() + message.seconds

        def expired() -> bool:
            return now() >= until

        if message.kind == "clear":
            if store is not None:
                await store.clear(message.generation)
            return bytes([Outcome.OK]), []
        if store is None:
            return bytes([Outcome.UNAVAILABLE]) * len(keys), []
        if message.kind == "ask":
            found = store.probe(keys)
            found = await store.ask(keys, expired) if found is None else found
            absent = Outcome.UNAVAILABLE if store.attempts.lookups.failing else Outcome.MISS
            return bytes([Outcome.OK]) * found + bytes([absent]) * (len(keys) - found), []
        if message.kind == "remove":
            await store.remove(keys)
            return bytes(len(keys)), []
        if message.kind == "read":
            outcomes, gone = await store.read(keys, views, expired)
        else:
            outcomes, gone = await store.write(keys, views, expired, message.lineages)
        # With keys that left outside of batches, a page at a time.
        gone = [*gone, *store.take_removed()]
        return bytes(outcomes), [key for key in gone if not store.holds(key)]
