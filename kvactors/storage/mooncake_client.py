"""Asynchronous calls of Mooncake's client, with guards against its failure modes.

The client ends the process if it is called before `setup` or after `close`, waits long for an
unreachable master, and returns no result for some failures. Here every call runs in one of a few
threads, no call begins after `close` has begun, `close` waits for the calls in flight, and a call
without a result returns a negative code. `setup` and `close` hold the interpreter's lock for as
long as they try to reach the master (90 s and 18 s when it is gone), so the master and the
metadata server are probed first.
Observed with mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import methodcaller
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import numpy as np

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.settings.check import in_bytes
from kvactors.settings.mooncake import (
    MooncakeConfig,
    PoolServer,
    endpoints,
    largest_registration,
    metadata_endpoints,
)
from kvactors.storage.header import NO_SPACE, NOT_FOUND, NOT_READY, OK, RPC_FAILED
from kvactors.threads import Workers

T = TypeVar("T")

log = get_logger()

THREADS = 2
"""More brought nothing when measured."""

CLOSE_LIMIT = 10.0
"""Seconds `close` waits for calls in flight, and for the client's own close (2 s when all is
well)."""

QUEUED = 16384
"""Transfers that the client queues for another node over TCP. Those beyond are rejected. Its own
limit is 1,024, as many as two calls of the back end have."""

SLICE = 1 << 20
"""Bytes of a read or write of a socket. With the client's own 64 KiB, an object of 64 KiB and its
header took a fifth more processor time than one without a header."""

ANSWER_LIMIT = 2.0
"""Seconds the master has to answer a request before the client leaves the pool."""

RETRY = 0.5
"""Seconds until a warm-up that failed is tried again: the pool may still place objects on a node
that has ended."""


class MooncakeClient:
    """One client of a pool. Pointers must stay valid until a call has returned. Calls are not cut
    short: Mooncake's own time-outs end them (`timeout_s` of the config)."""

    def __init__(self, config: MooncakeConfig, rank: int = 0) -> None:
        self.config = config
        self._rank = rank
        self._store: Any = None
        self._workers = Workers(THREADS, "kvactors-mooncake")
        self._open = False
        self._largest = largest_registration(os.environ)
        self._registered: list[int] = []  # addresses

    async def open(self) -> None:
        """Join the pool. StoreError names the missing part: the package, the master, a wrong
        setting. A client that is open stays as it is."""
        if self._open:
            return
        store = self._make()
        config = self.config
        if not await any_answers(endpoints(config.master_server_address), config.connect_timeout_s):
            raise StoreError(f"Mooncake's master at {config.master_server_address} does not answer")
        if not await self._metadata_reachable(config.connect_timeout_s):
            raise StoreError(
                f"Mooncake's metadata server at {config.metadata_server} does not answer"
            )
        for name, value in defaults(config.timeout_s).items():
            os.environ.setdefault(name, value)
        arguments = (
            config.local_hostname or own_address(config.master_server_address),
            config.metadata_server,
            in_bytes(config.global_segment_size, "global_segment_size"),
            in_bytes(config.local_buffer_size, "local_buffer_size"),
            config.protocol,
            config.devices_of(self._rank),
            config.master_server_address,
        )
        joining = self._workers.submit(lambda: store.setup(*arguments))
        with anyio.move_on_after(config.connect_timeout_s):
            code = await asyncio.shield(asyncio.wrap_future(joining))
            if code != OK:
                raise StoreError(
                    f"Mooncake at {config.master_server_address} refused to be joined: code {code}"
                )
            self._store = store
            self._open = True
        if self._open:
            await self._warm_up()
            return
        joining.add_done_callback(lambda done: _close_late(store, done))
        raise StoreError(
            f"Mooncake at {config.master_server_address} could not be joined in "
            f"{config.connect_timeout_s} s"
        )

    async def _warm_up(self) -> None:
        """Store the first object. It is tried again for `connect_timeout_s`."""
        code = RPC_FAILED
        until = anyio.current_time() + self.config.connect_timeout_s
        try:
            while True:
                code = await self.call(put_and_get, RPC_FAILED)
                if code in (OK, NO_SPACE) or anyio.current_time() + RETRY > until:
                    break
                await anyio.sleep(RETRY)
            master = self.config.master_server_address
            if code == NO_SPACE:
                # It may be full, or its first node with memory may join later: misses only.
                log.warning(
                    "the Mooncake pool has no space: blocks are not saved until it has",
                    master=master,
                )
            elif code != OK:
                raise StoreError(
                    f"the Mooncake pool at {master} stores nothing: its first object failed with "
                    f"code {code}. Check that this node reaches the other nodes' data ports"
                )
        except BaseException:
            await uncancelled(self.close())
            raise

    async def _metadata_reachable(self, seconds: float) -> bool:
        """Whether a metadata server accepts connections, if the pool has one."""
        servers = metadata_endpoints(self.config.metadata_server)
        return not servers or await any_answers(servers, seconds)

    async def _leavable(self) -> bool:
        """Whether the client can leave the pool at once: it blocks the process while it looks for a
        master or a metadata server that is gone. The elected master is asked itself: the cluster of
        etcd outlives it, and `health_check` returns the result of a ping of seconds ago."""
        masters = endpoints(self.config.master_server_address)
        if not await any_answers(masters, 1.0) or not await self._metadata_reachable(1.0):
            return False
        asked = asyncio.wrap_future(self._workers.submit(self._ask_master))
        with anyio.move_on_after(ANSWER_LIMIT):
            return await asyncio.shield(asked)
        return False

    def _ask_master(self) -> bool:
        """Whether the master answers a request, in one of the threads."""
        try:
            return int(self._store.batch_is_exist([PREFIX])[0]) >= 0
        except Exception as error:
            log.warning("mooncake raised", error=repr(error))
            return False

    @staticmethod
    def _make() -> Any:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StoreError(
                "a mooncake store needs its client: pip install '/path/to/kvactors[mooncake]' (and "
                f"libibverbs1, libnuma1): {error}"
            ) from error
        return MooncakeDistributedStore()

    async def call(self, work: Callable[[Any], T], failed: T) -> T:
        """Call `work(store)` in a thread, and wait for its end even if cancelled. Returns `failed`
        if there is no store (any more) or the client raises."""

        def guarded() -> T:
            if not self._open:
                return failed
            try:
                return work(self._store)
            except StoreError:
                raise
            except Exception as error:
                log.warning("mooncake raised", error=repr(error))
                return failed

        if not self._open:
            return failed
        return await self._workers.run(guarded)

    async def exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0, or a negative code a key. Asking gives an object a lease: ask only for what is
        about to be read."""
        return await self.call(
            lambda store: list(store.batch_is_exist(list(keys))), [RPC_FAILED] * len(keys)
        )

    async def remove(self, keys: Sequence[str]) -> list[int]:
        def work(store: Any) -> list[int]:
            return [int(store.remove(key, True)) for key in keys]

        return await self.call(work, [RPC_FAILED] * len(keys))

    async def register(self, arena: Arena) -> None:
        for address, size in pieces(arena.address, arena.nbytes, arena.stride, self._largest):
            code = await self.call(methodcaller("register_buffer", address, size), RPC_FAILED)
            if code != OK:
                await self.unregister()
                raise StoreError(
                    f"mooncake would not register {size} bytes of the host arena: code {code}. "
                    "MC_MAX_MR_SIZE sets the largest registration"
                )
            self._registered.append(address)

    async def unregister(self) -> None:
        while self._registered:
            address = self._registered.pop()
            await self.call(methodcaller("unregister_buffer", address), RPC_FAILED)

    async def close(self) -> None:
        """Leave the pool, which loses the memory that this client gave to it. A call that hangs is
        abandoned. The client is then not closed, since that could end the process. Without a master
        it is not closed either, since that would block the process for 18 s."""
        if not self._open:
            self._workers.close()
            return
        self._open = False
        idle = await self._workers.drained(CLOSE_LIMIT)
        if idle and await self._leavable():
            closing = self._workers.submit(self._store.close)
            with anyio.move_on_after(CLOSE_LIMIT):
                await asyncio.shield(asyncio.wrap_future(closing))
        else:
            log.warning(
                "mooncake's master is gone or a call hangs: the client stays open until the "
                "process ends"
            )
        self._workers.close()


def defaults(timeout_s: float) -> dict[str, str]:
    """Variables of the environment that the client reads at setup. Values that the user has set
    take precedence."""
    return {
        "MC_RPC_TIMEOUT_MS": str(int(1000 * timeout_s)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(int(1000 * timeout_s)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(max(1, int(timeout_s))),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(QUEUED),
        "MC_TCP_SLICE_SIZE": str(SLICE),
    }


async def any_answers(servers: Sequence[PoolServer], seconds: float) -> bool:
    """Whether one of some servers accepts connections. Each is given `seconds`."""
    for host, port in servers:
        with anyio.move_on_after(seconds), suppress(OSError):
            async with await anyio.connect_tcp(host, port):
                return True
    return False


def _close_late(store: Any, joined: Future[int]) -> None:
    """Leave a pool that was joined after the caller stopped waiting."""
    if not joined.cancelled() and joined.exception() is None and joined.result() == OK:
        store.close()


def own_address(master: str) -> str:
    """The address of this machine on the way to the master."""
    host, port = endpoints(master)[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"there is no way to Mooncake's master at {master}: {error}") from error


# -- the first object


PREFIX = "kvactors-warm-up/"
SIZE = 4096
"""Bytes of the object."""


def put_and_get(store: Any) -> int:
    """Put an object, read it back, and remove it."""
    name = PREFIX + uuid4().hex
    written = np.frombuffer(np.random.default_rng().bytes(SIZE), np.uint8)
    read = np.zeros(SIZE, np.uint8)
    code = int(store.put_from(name, int(written.ctypes.data), SIZE))
    if code != OK:
        return code
    size = int(store.get_into(name, int(read.ctypes.data), SIZE))
    store.remove(name, True)
    if size in (NOT_FOUND, NOT_READY):
        return NO_SPACE
    if size < 0:
        return size
    if size != SIZE or not np.array_equal(read, written):
        raise StoreError("the Mooncake pool returned other bytes than were written")
    return OK


def pieces(address: int, size: int, stride: int, largest: int | None) -> list[tuple[int, int]]:
    """Address and size of each registration of an arena. Each has whole slots, since no transfer
    may cross two of them.

    Args:
        size: bytes of the arena.
        largest: bytes of a registration at most, None for no limit.
    """
    if largest is None or size <= largest:
        return [(address, size)] if size else []
    if largest < stride:
        raise StoreError(
            f"MC_MAX_MR_SIZE {largest} is less than a slot of the host arena ({stride} bytes)"
        )
    step = largest // stride * stride
    return [(address + start, min(step, size - start)) for start in range(0, size, step)]
