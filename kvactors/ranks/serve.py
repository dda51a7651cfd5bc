"""One rank, inside its GPU worker's own loop: it has the device, an arena and a store of its own, and does what the leader asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import structlog
from msgspec.structs import replace

from kvactors.actor.clock import now
from kvactors.config import Config, StorageConfig
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.errors import ConfigError, LayoutError, RankError
from kvactors.gpu_swapper.executor import Executor, make_executor
from kvactors.gpu_swapper.messages import Direction
from kvactors.ranks.protocol import VERSION, Answer, Arrived, CopyBlocks, Hello, Refused, StoreObjects, Welcome
from kvactors.ranks.wire import Wire, connect
from kvactors.storage.backends import Backend, make_backend
from kvactors.storage.messages import Outcome
from kvactors.units import join_keys, split_keys

log = structlog.get_logger()

RETRY_LEAST, RETRY_MOST = 0.02, 0.5
"""Seconds between attempts to reach the leader; doubled each time."""

WELCOME_LIMIT = 10.0
"""Seconds the leader may take to admit a rank; then it tries again."""


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
    """Move this rank's share of every block until cancelled, for the cache whose leader listens at `endpoint` (unix:///path, tcp://host:port,
    or memory://name in the same loop).
    A leader that is not there, or goes, is tried again for ever.

    device: this rank's, `device.num_blocks` in all ranks alike. config: the leader's own; from it come the arena (`host`) and the store
    (`storage`, whose objects are this rank's alone). backend: in place of the config's. admitted: called each time the leader has
    admitted this rank. inline_copies: copy in the loop's thread, for loops of virtual time (with a memory:// endpoint).

    Raises ConfigError, LayoutError, StoreError, DeviceError at the start, and RankError if the leader refuses this rank as it is.
    """
    config = Config.from_env(base=config)
    if not 0 <= rank < ranks:
        raise ConfigError(f"there is no rank {rank} of {ranks}")
    if device.layout.block_size != config.cache.block_size:
        raise LayoutError(f"the device's blocks hold {device.layout.block_size} tokens, not {config.cache.block_size}")
    storage = StorageConfig(backend="none") if config.flush.only else replace(config.storage, rank=rank, ranks=ranks)
    if backend is None:
        backend = make_backend(storage, config.cache.model, device.layout.fingerprint, device.layout.block_bytes)
    slots = config.host.arena_slots(stored=backend is not None)
    arena = Arena(
        slots,
        device.layout.block_bytes,
        pinned=config.host.pinned and device.kind != "cuda",
        trailer=backend.trailer if backend else 0,
    )
    try:
        async with AsyncExitStack() as opened:
            executor = make_executor(device, arena, config.host, inline=inline_copies)
            opened.push_async_callback(_shielded, executor.close)
            if backend is not None:
                await backend.open()
                opened.push_async_callback(_shielded, backend.close)
            if inline_copies:
                arena.touch()
            else:
                await anyio.to_thread.run_sync(arena.touch)
            if backend is not None:
                await backend.attach(arena)
            await executor.open()
            one = _Serving(rank, ranks, executor, backend)
            await one.serve(endpoint, admitted or (lambda: None))
    finally:
        arena.close()


async def _shielded(close: Callable[[], Awaitable[None]]) -> None:
    with anyio.CancelScope(shield=True):
        await close()


class _Serving:
    def __init__(self, rank: int, ranks: int, executor: Executor, backend: Backend | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.executor = executor
        self.backend = backend
        self.arena = executor.arena

    async def serve(self, endpoint: str, admitted: Callable[[], None]) -> None:
        """Connect, be admitted, do what is asked; when the connection is lost finish that, and begin again."""
        pause = RETRY_LEAST
        while True:
            try:
                wire = await connect(endpoint)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(RETRY_MOST, 2 * pause)
                continue
            try:
                if await self._enter(wire):
                    pause = RETRY_LEAST
                    admitted()
                    async with anyio.create_task_group() as tasks:
                        while (message := await wire.receive()) is not None:
                            if isinstance(message, CopyBlocks):
                                tasks.start_soon(self._copy, wire, message)
                            elif isinstance(message, StoreObjects):
                                tasks.start_soon(self._store, wire, message)
            finally:
                wire.close()
            await asyncio.sleep(pause)

    async def _enter(self, wire: Wire) -> bool:
        keys = join_keys(self.backend.keys()) if self.backend is not None else b""
        device = self.executor.device
        wire.send(
            Hello(VERSION, self.rank, self.ranks, device.layout.fingerprint, device.num_blocks, self.arena.num_slots, keys)
        )
        message = None
        with anyio.move_on_after(WELCOME_LIMIT):
            message = await wire.receive()
        if isinstance(message, Refused):
            raise RankError(f"the leader refuses: {message.reason}")
        return isinstance(message, Welcome)

    async def _copy(self, wire: Wire, message: CopyBlocks) -> None:
        direction = Direction.TO_DEVICE if message.to_device else Direction.TO_HOST

        def progress(layers: int) -> None:
            wire.send(Arrived(message.op, layers))

        outcomes = bytearray(len(message.blocks))
        try:
            failed = await self.executor.run(direction, message.blocks, message.slots, progress if message.layerwise else None)
        except Exception as error:
            log.error("copy failed", rank=self.rank, error=repr(error))
            failed = tuple(range(len(outcomes)))
        for j in failed:
            outcomes[j] = 1
        wire.send(Answer(message.op, bytes(outcomes)))

    async def _store(self, wire: Wire, message: StoreObjects) -> None:
        keys = split_keys(message.keys)
        try:
            outcomes, gone = await self._at_store(message, keys)
        except Exception as error:
            log.error("back end raised", rank=self.rank, error=repr(error))
            outcomes, gone = bytes([Outcome.UNAVAILABLE]) * len(keys), []
        wire.send(Answer(message.op, outcomes, join_keys(gone)))

    async def _at_store(self, message: StoreObjects, keys: list[bytes]) -> tuple[bytes, list[bytes]]:
        store, until = self.backend, now() + message.seconds
        if store is None:
            return bytes([Outcome.UNAVAILABLE]) * len(keys), []
        if message.kind in ("read", "write"):
            views = [self.arena.view(slot) for slot in message.slots]
            move = store.read if message.kind == "read" else store.write
            report = await move(keys, views, lambda: now() >= until)
            gone = getattr(report, "gone", None) or getattr(report, "evicted", [])
            return report.outcomes, [key for key in gone if not store.holds(key)]
        if message.kind == "ask":
            found = store.probe(keys)
            found = await store.ask(keys, lambda: now() >= until) if found is None else found
            return bytes([Outcome.OK]) * found + bytes([Outcome.MISS]) * (len(keys) - found), []
        if message.kind == "remove":
            await store.remove(keys)
        else:
            await store.clear()
        return bytes(len(keys)), []
