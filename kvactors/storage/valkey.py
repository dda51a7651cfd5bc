"""Valkey or Redis as storage: every process that uses a server loads what the others wrote.

An object is one value: a block's payload, and the header of an object in a pool behind it
(`PoolHeaders`). The server evicts values and lets them expire, so this back end lists no keys. The
client is redis-py, whose blocking calls run in threads: on the loop they would copy each value.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from kvactors.actor.log import get_logger
from kvactors.errors import StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.native import addresses, object_names
from kvactors.settings.valkey import ValkeyConfig
from kvactors.storage.backend import Expired, Keys, Views
from kvactors.storage.header import HEADER, NO_SPACE, NOT_FOUND, RPC_FAILED, outcome_of
from kvactors.storage.messages import Outcome
from kvactors.storage.shared import SharedStore
from kvactors.threads import Workers, in_thread

T = TypeVar("T")

log = get_logger()

THREADS = 4
"""Calls at once. Each has a connection."""

PIPELINE_BYTES, PIPELINE_KEYS = 4 << 20, 1024
"""Limits of one pipeline. Its replies are in memory together, and no deadline cuts it short."""

SMALL_BYTES = 32 << 10
"""Objects up to this size are copied and sent together. Larger ones are sent from their slots."""

GONE_KEYS = 4096
"""Evicted keys that wait to be reported, at most. The oldest are dropped, and are misses."""

POLL_S, RETRY_S = 0.2, 1.0
"""Seconds of a wait for an eviction, and until a lost subscription is made again."""

CLOSE_S = 2.0
"""Seconds for which `close` waits for calls in flight, before it cuts their connections."""

FLAGS = "notify-keyspace-events"


class ValkeyBackend(SharedStore):
    """A client of a server or of a cluster."""

    slot_trailer_bytes = HEADER.size
    questions = (PIPELINE_KEYS, PIPELINE_KEYS)
    more_space = "Raise the server's maxmemory, or set its maxmemory-policy to allkeys-lru"

    def __init__(self, config: ValkeyConfig, identity: StoreIdentity, block_bytes: int) -> None:
        super().__init__(identity.digest, block_bytes)
        self.config = config
        self._addresses = config.addresses()
        self._prefix = identity.pool_prefix
        self._client: Any = None
        self._errors: tuple[type[Exception], ...] = ()  # of the client
        self._open = False
        self._workers = Workers(THREADS, "kvactors-valkey")
        self._watcher = Workers(1, "kvactors-valkey-evictions")
        self._gone: deque[bytes] = deque(maxlen=GONE_KEYS)

    # -- opening and closing

    async def open(self) -> None:
        await in_thread(self._connect, "kvactors-valkey-open")
        self._open = True
        if (events := await self._call(self._subscribe)) is not None:
            self._watcher.submit(partial(self._watch, events))

    def _connect(self) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.connection import PythonRespSerializer
            from redis.retry import Retry
        except ImportError as error:
            raise StoreError(
                f"a valkey store needs its client: pip install '/path/to/kvactors[valkey]': {error}"
            ) from error
        of_cluster = redis.exceptions.RedisClusterException
        self._errors = (redis.RedisError, of_cluster, OSError, ValueError)
        limit = self.config.timeout_s
        options = {"socket_timeout": limit, "socket_connect_timeout": limit, "protocol": 2}
        # This packer sends a value from its memory. That of hiredis copies it twice.
        packer = PythonRespSerializer(SMALL_BYTES, redis.Redis().get_encoder().encode)
        # A connection that the server has closed is made again. A call that timed out is not
        # repeated: it would take twice the time.
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
        for url in self._addresses:
            try:
                self._client = redis.Redis.from_url(
                    url, retry=retry, command_packer=packer, **options
                )
                info = self._client.info()
                if info.get("cluster_enabled"):
                    self._client.close()
                    self._client = redis.RedisCluster.from_url(url, retry=retry, **options)
                elif len(self._addresses) > 1:
                    raise StoreError(f"{self.config.shown} are several servers, and no cluster")
            except self._errors as error:
                self._failed(error)
                continue
            return self._log_policy(info)
        raise StoreError(f"the server cannot be used: {self._trouble}")

    def _log_policy(self, info: dict[str, Any]) -> None:
        """Log what the server does when its memory is full."""
        limit, policy = info.get("maxmemory"), str(info.get("maxmemory_policy"))
        keeps = policy == "noeviction" or (policy.startswith("volatile") and not self.config.ttl_s)
        about = {"server": self.config.shown, "maxmemory": limit, "maxmemory_policy": policy}
        if keeps or not limit:
            log.warning("valkey server without eviction", **about)
        else:
            log.info("valkey opened", **about)

    async def close(self) -> None:
        self._open = False
        if self._client is not None:
            idle = await self._workers.drained(CLOSE_S)
            await self._watcher.drained(CLOSE_S)
            await in_thread(self._client.close, "kvactors-valkey-close")
            self.stuck = not (idle or await self._workers.drained(CLOSE_S))
        self._workers.close()
        self._watcher.close()

    # -- calls

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and wait for its end even if cancelled.

        Raises:
            StoreUnavailable: the server does not answer, or refuses.
        """
        if not self._open:
            raise StoreUnavailable("the store is not open")
        try:
            return await self._workers.run(work)
        except self._errors as error:
            raise StoreUnavailable(self._failed(error)) from error

    def _failed(self, error: Exception) -> str:
        """The text of a failure. The client's errors have no password, and no name of an object."""
        self._trouble = f"{self.config.shown}: {type(error).__name__}: {error}".rstrip(".")
        return self._trouble

    def _pipeline(self, command: str, keys: Keys, *more: Sequence[Any]) -> list[Any]:
        """The reply, or the error, of a command for each key. In a thread. more: further arguments,
        one of each sequence a key."""
        names = object_names(self._prefix, b"".join(keys))
        with self._client.pipeline(transaction=False) as pipe:
            for arguments in zip(names, *more, strict=True):
                pipe.execute_command(command, *arguments)
            replies: list[Any] = pipe.execute(raise_on_error=False)
        return replies

    def _code(self, reply: Any) -> int:
        """The bytes of a value, a number, or the code of a pool for another reply. A list or a hash
        under the name of an object is an object of another size."""
        if isinstance(reply, Exception):
            self._failed(reply)
            if type(reply).__name__ == "OutOfMemoryError":
                return NO_SPACE
            return 0 if "WRONGTYPE" in str(reply) else RPC_FAILED
        if reply is None:
            return NOT_FOUND
        return len(reply) if isinstance(reply, bytes) else int(reply)

    # -- look-ups

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        codes = list(map(self._code, await self._call(partial(self._pipeline, "EXISTS", keys))))
        if max(codes, default=0) < 0:
            raise StoreUnavailable(self._trouble)
        return [code == 1 for code in codes]

    # -- reads and writes

    async def get(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        return await self._move(self._get, keys, views, expired)

    async def put(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        """An object that the server has is replaced, and its time to live begins again."""
        return await self._move(self._set, keys, views, expired)

    async def _move(
        self,
        transfer: Callable[[Sequence[bytes], Sequence[memoryview]], bytes],
        keys: Keys,
        views: Views,
        expired: Expired,
    ) -> bytes:
        """Move a batch in pipelines. None begins after the deadline, or after one that failed."""
        outcomes, rest = b"", Outcome.LATE
        step = min(PIPELINE_KEYS, max(1, PIPELINE_BYTES // self.block_bytes))
        try:
            while len(outcomes) < len(keys) and not expired():
                some = slice(len(outcomes), len(outcomes) + step)
                outcomes += await self._call(partial(transfer, keys[some], views[some]))
        except StoreUnavailable:
            rest = Outcome.UNAVAILABLE
        return outcomes.ljust(len(keys), bytes([rest]))

    def _get(self, keys: Keys, views: Views) -> bytes:
        """Read and unpack. In a thread."""
        values = self._pipeline("GET", keys)
        held = [memoryview(value if isinstance(value, bytes) else b"") for value in values]
        return self.unpack(keys, held, views, list(map(self._code, values)))

    def _set(self, keys: Keys, views: Views) -> bytes:
        """Make headers, and write. In a thread."""
        values: list[Any] = list(map(self._object, views))
        self.headers.make(b"".join(keys), [[address] for address in addresses(values)])
        if self.block_bytes <= SMALL_BYTES:
            values = list(map(bytes, values))
        expiry = ("EX", self.config.ttl_s) if self.config.ttl_s else ()
        replies = self._pipeline("SET", keys, values, *([word] * len(keys) for word in expiry))
        return bytes(outcome_of(self._code(reply)) for reply in replies)

    def _object(self, view: memoryview) -> memoryview:
        """The memory of an object: the slot with the space behind it, or a copy of the payload."""
        whole, address = self.block_bytes + HEADER.size, addresses([view])[0]
        if self.arena is not None and self.arena.holds(address):
            return memoryview((ctypes.c_ubyte * whole).from_address(address)).cast("B")
        return memoryview(bytearray(view) + bytes(HEADER.size))

    # -- removal

    async def remove(self, keys: Keys) -> None:
        """Objects stay if the server does not answer."""
        with suppress(StoreUnavailable):
            await self._call(partial(self._pipeline, "UNLINK", keys))

    async def remove_all(self) -> None:
        """The server looks at each of its keys."""
        await self._call(self._unlink_all)

    def _unlink_all(self) -> None:
        """In a thread."""
        names = self._client.scan_iter(match=f"{self._prefix}*", count=PIPELINE_KEYS)
        while some := list(islice(names, PIPELINE_KEYS)):
            self._client.unlink(*some)

    # -- evictions and expirations, which the server announces if it is configured to

    def _subscribe(self) -> Any:
        """The subscription, None without one. In a thread."""
        try:
            flags = self._client.config_get(FLAGS)[FLAGS]
            if "E" in flags and ("A" in flags or {"e", "x"} <= set(flags)):
                events = self._client.keyspace_notifications(key_prefix=self._prefix)
                number = int(self._client.get_connection_kwargs().get("db") or 0)
                for event in ("evicted", "expired"):
                    events.subscribe_keyevent(event, db=number)
                return events
            why = f"{FLAGS} is {flags!r}, without Eex"
        except self._errors as error:  # services refuse CONFIG
            why = self._failed(error)
        log.info("valkey evictions are noticed as misses only", reason=why)
        return None

    def _watch(self, events: Any) -> None:
        """Collect the keys that the server evicts, until the store is closed. In a thread. Keys
        that are evicted while the subscription is lost are misses."""
        while self._open:
            try:
                if (found := events.get_message(timeout=POLL_S)) is not None:
                    self._gone.append(bytes.fromhex(found.key))
            except self._errors:  # ValueError: a name under the prefix that is no object's
                time.sleep(RETRY_S)
        events.close()

    @property
    def removed_outside(self) -> bool:  # type: ignore[override]
        return bool(self._gone)

    def take_removed(self) -> list[bytes]:
        page = [self._gone.popleft() for _ in range(len(self._gone))]
        self.counters.evicted += len(page)
        return page
