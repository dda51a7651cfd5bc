"""The decisions over LMCache's objects: look-ups, stores, loads, evictions.

LMCache's threads hand calls over and take results. The event loop of the store makes every
decision, so nothing is shared. It never waits: pages are moved by a few threads, and the file of
the keys has its own one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeVar

from kvactors.actor.log import described, get_logger
from kvactors.integrations.lmcache.catalog import (
    DIGEST_BYTES,
    Key,
    KeyCatalog,
    KeyFile,
    ObjectShape,
    Record,
    StoredObject,
    chunk_order,
    is_serialized,
    stored_object,
)
from kvactors.integrations.page_store import AT_ONCE, PageRegion, PageStore
from kvactors.threads import Workers
from kvactors.tier_cache import StorageResult

T = TypeVar("T")

log = get_logger()

MOVERS = 2  # threads for loads, and as many for stores
BUFFERS = 2 * MOVERS * AT_ONCE  # of all threads


class Buffer(NamedTuple):
    """Memory of LMCache for one object, which `owner` keeps alive."""

    shape: ObjectShape
    address: int
    owner: Any


@dataclass(eq=False, slots=True)
class TransferTask:
    """A store or load task.

    Attributes:
        buffers: memory of each object, None where there is none that fits.
        deadline: on the monotonic clock. Objects that are not done by then fail.
        ok: one bool a key, valid when the task has ended.
        left: objects on their way.
    """

    number: int
    keys: Sequence[Key]
    buffers: Sequence[Buffer | None]
    deadline: float
    save: bool = field(kw_only=True)
    ok: list[bool] = field(init=False)
    left: int = 0
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.ok = [False] * len(self.keys)


class ObjectTransfer(NamedTuple):
    """The move of one object of a task between LMCache's memory and the store."""

    task: TransferTask
    position: int
    buffer: Buffer
    found: StoredObject


class TransferReport(Protocol):
    """Takes results and changes, in the store's thread. Objects that were found are locked."""

    def task_ended(self, task: TransferTask) -> None: ...
    def looked_up(self, number: int, found: list[bool]) -> None: ...
    def stored(self, keys: list[Key], sizes: list[int]) -> None: ...
    def accessed(self, keys: list[Key]) -> None: ...
    def deleted(self, keys: list[Key], sizes: list[int]) -> None: ...


class ObjectStore:
    """The objects and the tasks in flight. `post`, `ask` and `stop` are called in any thread, the
    others on the event loop of the store."""

    def __init__(
        self, pages: PageStore, keys: KeyFile, catalog: KeyCatalog, report: TransferReport
    ) -> None:
        self.tier = pages.tier
        self.catalog = catalog
        self.keys = keys
        self.tasks: dict[int, TransferTask] = {}
        self.running = True
        self._pages = pages
        self._report = report
        self._movers = {
            save: Workers(MOVERS, f"kvactors-lmcache-{'store' if save else 'load'}")
            for save in (False, True)
        }
        # By digest of the objects that are being stored: the transfer, and others that wait for it.
        self._storing: dict[bytes, list[ObjectTransfer]] = {}
        self._unwritten: dict[Key, Record] = {}  # stored objects that are not in the key file yet
        pages.ended = self._job_ended
        self._thread = 0

    # -- any thread

    def post(self, call: Callable[[], object]) -> bool:
        """Make a call on the loop. Returns False if it has ended."""
        return self.tier.call(self._run, call)

    def ask(self, call: Callable[[], T], limit: float, otherwise: T) -> T:
        """The result of a call on the loop, or `otherwise` after `limit` seconds."""
        if get_ident() == self._thread:  # LMCache's listener, in a report
            return call()
        answer: Future[T] = Future()
        if not self.post(partial(_answer, answer, call)):
            return otherwise
        try:
            return answer.result(limit)
        except TimeoutError:
            return otherwise

    def stop(self, limit: float) -> bool:
        """End the moves in flight, fail the tasks of those that hang, and write the keys. Returns
        whether no result is reported any more, about `limit` seconds after the call."""
        self.running = False
        self._pages.stopped = True
        for movers in self._movers.values():
            movers.end(limit / 2)  # before a task fails, whose memory they may write
            movers.close()
        if not self.ask(self._give_up_all, limit, otherwise=False):
            return False
        self.keys.finish(self.catalog.records(), limit)
        return True

    def _give_up_all(self) -> bool:
        for number in list(self.tasks):
            self.end_task(number)
        return True

    def _run(self, call: Callable[[], object]) -> None:
        self._thread = get_ident()
        try:
            call()
        except Exception as error:
            log.error("LMCache call failed", call=str(call), error=described(error))

    # -- look-ups, locks, removals

    def look_up(self, number: int, keys: Sequence[Key], layouts: Mapping[int, str]) -> None:
        """Look keys up, and lock those that are found. `layouts`: wanted of each object group, any
        of a group that it lacks."""
        usable = not self.tier.trouble
        found = [usable and self._has(key, layouts.get(key.object_group_id)) for key in keys]
        hits = [key for key, there in zip(keys, found, strict=True) if there]
        for key in hits:
            self.catalog.lock(key)
        self.catalog.touch(hits)
        self._report.looked_up(number, found)
        if hits:
            self._report.accessed(hits)

    def _has(self, key: Key, layout: str | None) -> bool:
        known = self.catalog.objects.get(key)
        if known is None:
            return False
        fits = layout in (None, known.shape.layout) or is_serialized(known.shape.layout)
        return fits and self._complete(key)

    def _complete(self, key: Key) -> bool:
        """Whether the store has all pages of an object. If not, the object is dropped."""
        found = self.catalog.objects.get(key)
        if found is None:
            return False
        if all(map(self.tier.contains, found.page_keys())):
            return True
        self._drop([key])
        return False

    def unlock(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.catalog.unlock(key)

    def delete(self, keys: Iterable[Key]) -> int:
        """Delete objects without locks. Returns their number."""
        known = [key for key in dict.fromkeys(keys) if key in self.catalog.objects]
        chosen = [key for key in known if key not in self.catalog.locks]
        self._drop(chosen)
        return len(chosen)

    def _drop(self, keys: Iterable[Key]) -> None:
        removed = [(key, self.catalog.remove(key)) for key in keys]
        gone = [(key, found) for key, found in removed if found is not None]
        for key, _ in gone:
            self._unwritten.pop(key, None)
        if gone:
            self.tier.remove([page for _, found in gone for page in found.page_keys()])
            self._report.deleted([key for key, _ in gone], [found.shape.size for _, found in gone])

    # -- stores and loads

    def begin(self, task: TransferTask) -> None:
        self.tasks[task.number] = task
        task.left = 1  # until every object has begun
        try:
            if self.running and not self.tier.trouble:
                begin = self._begin_save if task.save else self._begin_load
                begin(task)
        finally:
            self._count_down(task)

    def _begin_load(self, task: TransferTask) -> None:
        for index, (key, buffer) in enumerate(zip(task.keys, task.buffers, strict=True)):
            found = self.catalog.objects.get(key)
            if found is not None and buffer is not None and found.shape == buffer.shape:
                self.catalog.lock(key)
                self._start(ObjectTransfer(task, index, buffer, found))

    def _begin_save(self, task: TransferTask) -> None:
        keep = set(task.keys)
        for index, (key, buffer) in enumerate(zip(task.keys, task.buffers, strict=True)):
            if buffer is None:
                continue
            known = self.catalog.objects.get(key)
            if known is not None and known.shape == buffer.shape and self._complete(key):
                task.ok[index] = True
                continue
            wanted = stored_object(key, buffer.shape, self.tier.block_bytes)
            transfer = ObjectTransfer(task, index, buffer, wanted)
            if wanted.digest in self._storing:
                task.left += 1
                self._storing[wanted.digest].append(transfer)
            elif self._make_space(key, wanted.pages, keep):
                self._storing[wanted.digest] = [transfer]
                self.catalog.reserved += wanted.pages
                self._start(transfer)
        self.catalog.touch(task.keys)

    def _make_space(self, key: Key, pages: int, keep: set[Key]) -> bool:
        """Evict until `pages` fit: first an object of another layout under the same key."""
        if key in self.catalog.objects:
            if key in self.catalog.locks:
                return False
            self._drop([key])
        victims = self.catalog.victims(pages, keep)
        if victims is None:
            return False
        self._drop(victims)
        return True

    def _start(self, transfer: ObjectTransfer) -> None:
        transfer.task.left += 1
        moved = self._movers[transfer.task.save].submit(partial(self._move, transfer))
        moved.add_done_callback(lambda done: self.post(partial(self._moved, transfer, done)))

    def _move(self, transfer: ObjectTransfer) -> bool:
        """Move the pages of an object, in a thread. Ends at the task's deadline."""
        if not self.running or time.monotonic() >= transfer.task.deadline:
            return False
        (_, size), address, _ = transfer.buffer
        page = self.tier.block_bytes
        parts = [[PageRegion(address + at, min(page, size - at))] for at in range(0, size, page)]
        move = self._pages.save if transfer.task.save else self._pages.load
        return all(move(transfer.found.page_keys(), parts, transfer.task.deadline))

    def _moved(self, transfer: ObjectTransfer, done: Future[bool]) -> None:
        task, position, _, found = transfer
        key, ok = task.keys[position], done.exception() is None and done.result()
        ended = self._storing.pop(found.digest) if task.save else [transfer]
        try:
            if not task.save:
                self.catalog.unlock(key)
                if not ok:
                    self._complete(key)
                return
            self.catalog.reserved -= found.pages
            ok = ok and key not in self.catalog.objects
            if ok:
                self.catalog.add(key, found)
                self._unwritten[key] = (key, found.shape)
                self._report.stored([key], [found.shape.size])
            else:
                self.tier.remove(found.page_keys())
        finally:  # a listener of LMCache may raise, and its tasks end all the same
            for each in ended:
                each.task.ok[each.position] = ok
                each.task.nbytes += found.shape.size if ok else 0
                self._count_down(each.task)

    def _job_ended(self, result: StorageResult) -> None:
        if result.removed:
            self.post(partial(self._lost, result.removed))
        if result.saved:  # of a store whose task has failed, perhaps
            good = [page for page, ok in zip(result.keys, result.ok, strict=True) if ok]
            self.post(partial(self._remove_strays, good))

    def _lost(self, pages: Sequence[bytes]) -> None:
        """Drop the objects of pages that have left the store, which evicts on a full disk."""
        digests = {page[:DIGEST_BYTES] for page in pages}
        known = self.catalog.objects.items()
        self._drop([key for key, found in known if found.digest in digests])

    def _remove_strays(self, pages: Iterable[bytes]) -> None:
        """Remove pages of objects that are neither stored nor being stored."""
        others = [page for page in pages if page[:DIGEST_BYTES] not in self._storing]
        if others:
            known = {found.digest for found in self.catalog.objects.values()}
            self.tier.remove([page for page in others if page[:DIGEST_BYTES] not in known])

    def _count_down(self, task: TransferTask) -> None:
        task.left -= 1
        if task.left:
            return
        if task.save:
            self.catalog.touch(task.keys)
        # A store task ends when its keys are in the file, also those that another task has stored.
        # The end of the prefix comes first: the file's order is the order of use after a restart.
        keys = dict.fromkeys(reversed(chunk_order(task.keys))) if task.save else ()
        records = [self._unwritten[key] for key in keys if key in self._unwritten]
        if not records:
            self.end_task(task.number)
            return
        whole = self.catalog.records() if self.keys.is_long(len(self.catalog.objects)) else None
        end = partial(self.end_task, task.number)
        asyncio.get_running_loop().call_at(task.deadline, self._run, end)  # the disk may hang
        written = partial(self._written, records, end)
        self.keys.write(records, whole, lambda: self.post(written))

    def _written(self, records: Sequence[Record], end: Callable[[], None]) -> None:
        for record in records:
            if self._unwritten.get(record[0]) is record:
                del self._unwritten[record[0]]
        end()

    def end_task(self, number: int) -> None:
        task = self.tasks.pop(number, None)
        if task is not None:
            self._report.task_ended(task)


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except Exception as error:
        answer.set_exception(error)
