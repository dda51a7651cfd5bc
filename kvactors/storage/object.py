"""Object stores (S3, Google Cloud Storage, Azure) and a folder that several nodes write, through
the library `obstore`: every node can load the objects of every other node.

An object has the name `kvactors/MODEL/NAMESPACE/rank-R-of-N/DIGEST/3 hex digits of the key/KEY`, so
keys spread over 4,096 folders, and over the partitions of a bucket. Its bytes are a payload and the
header that objects of a Mooncake pool have. One request publishes it whole, in a folder a rename.
No lock is taken."""

from __future__ import annotations

import asyncio
import atexit
import errno
import re
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import anyio

from kvactors.errors import ConfigError, StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.native import addresses
from kvactors.settings.tables import StorageConfig
from kvactors.storage.backend import Expired, Keys, Views
from kvactors.storage.header import HEADER
from kvactors.storage.messages import Outcome
from kvactors.storage.shared import SharedStore
from kvactors.threads import EXIT_LIMIT_S, DaemonExecutor, Workers

ROOT = "kvactors"
STORE = f"{ROOT}/[!-.0-~]+/[!-.0-~]+/rank-[0-9]+-of-[0-9]+/[0-9a-f]{{64}}"
FOLDER = re.compile(f"{ROOT}|{STORE}(/[0-9a-f]{{3}})?")
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
OBJECT = re.compile(f"({STORE})/([0-9a-f]{{3}})/\\2[0-9a-f]{{61}}")
"""Name of an object. Its first group is its store."""

PAGE_OBJECTS = 1000
"""Objects of one page of a listing, and of one request that deletes."""

PAGE_LIMIT_S = 60.0
"""Seconds in which such a page must be listed and deleted."""

NO_SPACE = ("os error 28", "os error 122", "QuotaExceeded<")
"""In errors of a folder (ENOSPC, EDQUOT), and of a bucket with a quota (Ceph, MinIO)."""
THREADS = 2
"""Threads that copy blocks and compute checksums."""

INLINE_BYTES = 64 << 10
"""Bytes of a block up to which the loop does so: a thread takes longer to wake up."""


@atexit.register
def threads_have_left() -> None:
    """Wait at the interpreter's exit until the library's threads have left Python: two looks in a
    row find no frame of a thread that Python has not started. One hands a result to the loop, which
    may end before that thread has the GIL again. Before Python 3.14 asking for it then aborts the
    process (30 of 200 on a busy machine)."""
    until, quiet = time.monotonic() + EXIT_LIMIT_S, 0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(0.002)
        own = {thread.ident for thread in threading.enumerate()}
        quiet = 0 if sys._current_frames().keys() - own else quiet + 1


def prefix_of(identity: StoreIdentity) -> str:
    """What the names of all objects of an identity begin with. It ends with the digest."""
    shown = identity._replace(namespace=quote(identity.namespace, safe=""))
    return f"{shown.folder(ROOT).as_posix()}/{identity.digest.hex()}"


def open_store(settings: StorageConfig) -> Any:
    """The library's store, without a connection.

    Raises:
        ConfigError: the library does not take the settings.
        StoreError: the library or the folder is missing.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise StoreError(
            f"a store of objects needs obstore: pip install '/path/to/kvactors[object]': {error}"
        ) from error
    half = timedelta(seconds=settings.timeout_s / 2)  # a request that hangs is tried once more
    given = {"endpoint": settings.endpoint, "region": settings.region}
    about: dict[str, Any] = {
        "config": {name: value for name, value in given.items() if value},
        # Plain HTTP is used only with an endpoint that says so.
        "client_options": {"timeout": half, "allow_http": True},
        "retry_config": {"max_retries": 3, "retry_timeout": half},
    }
    try:
        return from_url(settings.url, **({} if settings.url.startswith("file:") else about))
    except Exception as error:
        text = f"storage.url {settings.url!r}: {reason(error)}"
        if "UnableToCanonicalize" in str(error):  # a mount that is missing must not be made
            raise StoreError(f"{text}. Mount the folder, or create it") from error
        raise ConfigError(text) from error


def reason(error: BaseException) -> str:
    """The first line of an error, without keys."""
    text = str(error).partition("\n")[0].partition(": <?xml")[0]
    if not text:
        text = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return re.sub(r" (?:for path|at location) \S+:?|/[0-9a-f]{64}\S*", "", text)[:300]


class ObjectBackend(SharedStore):
    """A client of an object store. The bytes that the library reads or sends are its own copies, so
    a request that is given up touches no slot. `storage.io_depth` is the number of reads and
    look-ups at once of a batch, and `storage.io_write_depth` that of writes and deletions.

    Args:
        prefix: see `prefix_of`.
    """

    more_space = (
        "Free space on the folder's disk, or raise the quota of the disk or the bucket. "
        "`kvactors store prune URL --max-bytes SIZE` removes the oldest objects"
    )

    def __init__(self, settings: StorageConfig, prefix: str, block_bytes: int) -> None:
        super().__init__(bytes.fromhex(prefix[-64:]), block_bytes)
        self.store: Any = None
        self._settings = settings
        self._prefix = prefix
        self._workers = Workers(THREADS, "object-store")
        # A batch ends before it counts as a call that does not return (`GuardedBackend.overdue`).
        self._limit = 0.9 * settings.timeout_s
        self._depth = settings.io_depth
        self.questions = (1, self._depth)
        self._write_depth = settings.io_write_depth or settings.io_depth
        self._puts: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """Ask for the first name of a listing: a look-up cannot tell a bucket that is missing from
        an object that is. The client of a folder has looked for it."""
        settings = self._settings
        try:
            with anyio.fail_after(self._limit):
                # A folder on a mount that hangs costs a thread, and not the loop.
                opening = self._workers.submit(partial(open_store, settings))
                self.store = await asyncio.wrap_future(opening)
                if not settings.url.startswith("file:"):
                    await anext(self.store.list(self._prefix, chunk_size=1), None)
        except (StoreError, ConfigError):
            raise
        except Exception as error:
            raise StoreError(f"{settings.url} cannot be used: {reason(error)}") from error

    async def close(self) -> None:
        """Requests in flight are given up."""
        for put in self._puts:
            put.cancel()
        self._workers.close()

    def name(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()[:3]}/{key.hex()}"

    # -- look-ups

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        async def look(i: int) -> Outcome:
            return Outcome.MISS if await self._size(keys[i]) is None else Outcome.OK

        found = await self._each(self._depth, len(keys), expired, look)
        self.counters.outcomes[Outcome.UNAVAILABLE] += found.count(Outcome.UNAVAILABLE)
        if Outcome.UNAVAILABLE in found and not {Outcome.OK, Outcome.MISS} & set(found):
            raise StoreUnavailable(self._trouble)
        return [outcome == Outcome.OK for outcome in found]

    async def _size(self, key: bytes) -> int | None:
        """Bytes of an object, None if there is none."""
        try:
            return int((await self.store.head_async(self.name(key)))["size"])
        except FileNotFoundError:
            return None

    # -- reads and writes

    async def get(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        async def get(i: int) -> Outcome:
            try:
                found = await self.store.get_async(self.name(keys[i]))
                if found.meta["size"] != self.block_bytes + HEADER.size:
                    return Outcome.CORRUPT
                data = await found.bytes_async()
            except FileNotFoundError:
                return Outcome.MISS
            values = [memoryview(data)]
            unpack = partial(self.unpack, [keys[i]], values, [views[i]], [len(values[0])])
            return Outcome((await self._in_thread(unpack))[0])

        return bytes(await self._each(self._depth, len(keys), expired, get))

    async def put(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        """Equal keys have equal contents, so it does not matter which of two nodes writes last. A
        look-up costs less than an object that is sent again."""

        async def put(i: int) -> Outcome:
            # One of another size is replaced. Reads find it corrupt.
            if await self._size(keys[i]) == self.block_bytes + HEADER.size:
                return Outcome.EXISTS
            data = await self._in_thread(partial(self._pack, keys[i], views[i]))
            sent = self.store.put_async(self.name(keys[i]), data, use_multipart=False)
            # One that is given up here may still take effect: `clear` waits for it.
            sending = asyncio.ensure_future(sent)
            self._puts.add(sending)
            sending.add_done_callback(self._put_ended)
            await asyncio.shield(sending)
            return Outcome.OK

        return bytes(await self._each(self._write_depth, len(keys), expired, put))

    def _put_ended(self, put: asyncio.Future[Any]) -> None:
        self._puts.discard(put)
        if not put.cancelled():
            put.exception()  # else it would be logged as unseen

    async def _each(
        self, depth: int, count: int, expired: Expired, move: Callable[[int], Awaitable[Outcome]]
    ) -> bytearray:
        """Move objects, `depth` at once. Returns their outcomes: LATE for those that were not begun
        in time, UNAVAILABLE for those that failed or did not end."""
        outcomes, numbers = bytearray([Outcome.LATE]) * count, iter(range(count))

        async def work() -> None:
            for i in numbers:
                if expired():
                    return
                outcomes[i] = Outcome.UNAVAILABLE
                try:
                    outcomes[i] = await move(i)
                except Exception as error:
                    self._trouble = reason(error)
                    if any(text in str(error) for text in NO_SPACE):
                        outcomes[i] = Outcome.NO_SPACE

        with anyio.move_on_after(self._limit) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(depth, count)):
                    tasks.start_soon(work)
        if scope.cancelled_caught:
            self._trouble = f"no answer within {self._limit:.1f} s"
        return outcomes

    def _pack(self, key: bytes, view: memoryview) -> bytes:
        header = bytearray(HEADER.size)
        self.headers.make(key, [addresses([view, memoryview(header)])])
        return b"".join((view, header))

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        if self.block_bytes <= INLINE_BYTES:
            return call()
        return await self._workers.run(call)

    # -- removal

    async def remove(self, keys: Keys) -> None:
        async def remove(i: int) -> Outcome:
            await delete(self.store, [self.name(keys[i])])
            return Outcome.OK

        await self._each(self._write_depth, len(keys), lambda: False, remove)

    async def remove_all(self) -> None:
        """Delete the objects of this identity, a page at a time. What other nodes write meanwhile
        may stay."""
        if self._puts:
            await asyncio.wait(list(self._puts), timeout=self._limit)
        try:
            if self._puts:
                raise TimeoutError("writes that were begun have not ended")
            await delete_listed(self.store, self._prefix)
        except Exception as error:
            raise StoreError(f"{self._settings.url} was not cleared: {reason(error)}") from error


class Listed(NamedTuple):
    """An object of a listing. written_at: Unix time in seconds."""

    name: str
    size: int
    written_at: float


async def list_objects(store: Any, prefix: str) -> AsyncIterator[list[Listed]]:
    """The objects under a prefix, in pages. Everything else is passed over."""
    if not isinstance(store.prefix, Path):
        async for page in store.list(prefix, chunk_size=PAGE_OBJECTS):
            yield [
                Listed(one["path"], one["size"], one["last_modified"].timestamp())
                for one in page
                if OBJECT.fullmatch(one["path"])
            ]
        return
    # The library's listing of a folder fails at any link in a circle, name that is not UTF-8, or
    # folder that cannot be read.
    found = (one for one in files_below(store.prefix, prefix) if "#" not in one.name)
    thread = DaemonExecutor("object-store-list")
    while some := await asyncio.wrap_future(thread.submit(list, islice(found, PAGE_OBJECTS))):
        yield some


def files_below(root: Path, folder: str) -> Iterator[Listed]:
    """The objects below a folder, and their temporary files (NAME#N). Links are followed as deep as
    objects are, so not in circles. OSError if a folder of objects cannot be read."""
    paths: list[Path] = []
    try:
        paths = list((root / folder).iterdir())
    except OSError as error:
        if FOLDER.fullmatch(folder) and error.errno not in NO_FOLDER:
            raise
    for path in paths:
        name = f"{folder}/{path.name}"
        if name.count("/") < 6:
            yield from files_below(root, name)
        elif OBJECT.fullmatch(name.partition("#")[0]):
            with suppress(FileNotFoundError):  # removed or renamed meanwhile
                state = path.lstat()
                if not stat.S_ISDIR(state.st_mode):
                    yield Listed(name, state.st_size, state.st_mtime)


async def delete_listed(
    store: Any, prefix: str, chosen: Callable[[Listed], bool] = lambda _: True
) -> None:
    """Delete the chosen ones of the objects under a prefix."""
    pages = list_objects(store, prefix)
    page: list[Listed] | None = []
    while page is not None:
        with anyio.fail_after(PAGE_LIMIT_S):
            await delete(store, [one.name for one in page if chosen(one)])
            page = await anext(pages, None)


async def delete(store: Any, names: Sequence[str]) -> None:
    """Delete objects by one request, if the store has one. Some stores refuse a list with an object
    that another node has deleted."""
    try:
        if names:
            await store.delete_async(names)
    except FileNotFoundError:
        for name in names if len(names) > 1 else ():
            await delete(store, [name])
