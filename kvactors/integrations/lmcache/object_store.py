"""The decisions over LMCache's objects: look-ups, stores, loads, evictions. State of one thread.

It never waits for the file system: the store and the file of the keys have their own threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from kvactors.errors import CacheClosed
from kvactors.identity import field
from kvactors.integrations.lmcache.catalog import KeyCatalog, KeyLog, KeyWriter, Record
from kvactors.integrations.lmcache.transfers import (
    PageJob,
    PageTransfer,
    TransferLane,
    TransferTask,
)
from kvactors.integrations.model_files import model_digest
from kvactors.threads import Workers
from kvactors.tier_cache import SlotMemory, StorageResult, StorageTier

# -- Identity of LMCache's objects: their keys, layouts, and the keys of their pages.


OBJECT_DOMAIN = b"kvactors.lmcache.v1"
HASH, MODEL, RANK, GROUP, SALT, LAYOUT, SIZE = range(1, 8)
DIGEST_BYTES = 32
MODEL_TIMEOUT_S = 10.0
"""Seconds that the files of a model may take to be read, once in a process."""


class Key(Protocol):
    """LMCache's `ObjectKey`. It is hashable.

    `kv_rank` contains the world size and the rank, and the chunk's hash covers all tokens up to
    the chunk's end.
    """

    @property
    def chunk_hash(self) -> bytes: ...  # noqa: D102
    @property
    def model_name(self) -> str: ...  # noqa: D102
    @property
    def kv_rank(self) -> int: ...  # noqa: D102
    @property
    def object_group_id(self) -> int: ...  # noqa: D102
    @property
    def cache_salt(self) -> str: ...  # noqa: D102


class ObjectShape(NamedTuple):
    """The part of an object's identity that LMCache's key lacks.

    Attributes:
        layout: dtypes and shapes of its tensors. A shape contains the tokens of a chunk.
        size: bytes.
    """

    layout: str
    size: int


class StoredObject(NamedTuple):
    """An object of the store.

    Attributes:
        shape: its layout and size.
        digest: 32 bytes that identify key, layout and size.
        pages: number of its pages.
    """

    shape: ObjectShape
    digest: bytes
    pages: int

    def page_keys(self) -> list[bytes]:
        """The keys of its pages in the store."""
        return [self.page_key(number) for number in range(self.pages)]

    def page_key(self, number: int) -> bytes:
        """The key of one page."""
        return self.digest + number.to_bytes(4, "little")


def stored_object(key: Key, shape: ObjectShape, page_bytes: int) -> StoredObject:
    """The object of a key."""
    parts = (
        (HASH, key.chunk_hash),
        (MODEL, stored_model(key.model_name).encode("utf-8", "surrogatepass")),
        (RANK, str(key.kv_rank).encode()),
        (GROUP, str(key.object_group_id).encode()),
        (SALT, key.cache_salt.encode("utf-8", "surrogatepass")),
        (LAYOUT, shape.layout.encode()),
        (SIZE, str(shape.size).encode()),
    )
    text = OBJECT_DOMAIN + b"".join(field(tag, value) for tag, value in parts)
    return StoredObject(shape, sha256(text).digest(), -(-shape.size // page_bytes))


@lru_cache(maxsize=256)
def stored_model(name: str) -> str:
    """The name of a model with the digest of its files, which LMCache names by their path."""
    disk = Workers(1, "kvactors-lmcache-model")
    try:
        digest = disk.submit(partial(model_digest, name, {})).result(MODEL_TIMEOUT_S)
    except TimeoutError:
        digest = secrets.token_hex()  # weights that are not known: no later process finds them
    finally:
        disk.close()
    return f"{name}@{digest}"


def layout_of(shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> str:
    """The layout of an object with these tensors, as text: `float16[2,4,64,256]`, for instance."""
    return _layout(tuple(tuple(shape) for shape in shapes), tuple(dtypes))


@lru_cache(maxsize=256)
def _layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
    return ";".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(str(size) for size in shape)}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def is_serialized(layout: str) -> bool:
    """Whether an object of this layout is a string of bytes, as LMCache's serializers make it. Its
    layout is not the one that a look-up asks for."""
    return layout.startswith("uint8[") and "," not in layout and ";" not in layout


BATCH = 16
"""Pages of one job of the store."""


class TransferReport(Protocol):
    """The receiver of results and changes. It is called in the worker's thread."""

    def task_ended(self, task: TransferTask) -> None:
        """A store or load task has ended."""

    def looked_up(self, number: int, found: list[bool]) -> None:
        """A look-up has been answered. The objects that were found are locked."""

    def stored(self, keys: list[Key], sizes: list[int]) -> None:
        """Objects are in the store now."""

    def accessed(self, keys: list[Key]) -> None:
        """Objects were found by a look-up."""

    def deleted(self, keys: list[Key], sizes: list[int]) -> None:
        """Objects are not in the store any more."""


class ObjectStore:
    """The objects and the tasks in flight. Every method but `close` is called in one thread.

    Args:
        tier: the store of the pages, open.
        keys: the file of the keys, open.
        catalog: the objects in the store.
        report: receives results.
        post: runs a call in the thread later, called from any thread.
        staging: memory that pages pass through, half of it for stores and half for loads.

    Attributes:
        tasks: in flight, by number.
        keys: writes the file of the keys.
    """

    def __init__(
        self,
        tier: StorageTier,
        keys: KeyLog,
        catalog: KeyCatalog,
        report: TransferReport,
        post: Callable[[Callable[[], None]], None],
        staging: SlotMemory,
    ) -> None:
        self.tier = tier
        self.catalog = catalog
        self.tasks: dict[int, TransferTask] = {}
        self.keys = KeyWriter(keys)
        self._report = report
        self._post = post
        self._memory = staging
        half = staging.num_slots // 2
        self._loads = TransferLane(self._memory, range(half), save=False)
        self._saves = TransferLane(self._memory, range(half, staging.num_slots), save=True)
        self._storing: dict[Key, PageTransfer] = {}
        self._stored: list[Record] = []  # in this turn
        self._ended_tasks: list[TransferTask] = []  # in this turn

    def close(self, limit: float) -> None:
        """Write the keys, which takes at most `limit` seconds. The thread has ended."""
        self.keys.close(self._all_records(), limit)

    def keep_memory(self) -> None:
        """Leave the staging memory mapped, because a call to the file system still uses it."""
        self._memory.keep()

    # -- look-ups, locks, removals

    def look_up(self, number: int, keys: Sequence[Key], layouts: Mapping[int, str]) -> None:
        """Look keys up, and lock those that are found.

        Args:
            number: of the task.
            keys: of the objects.
            layouts: the layout that is wanted of each object group. None for a group: any.
        """
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
        known = self.catalog.get(key)
        if known is None:
            return False
        if layout is not None and layout != known.shape.layout:
            return is_serialized(known.shape.layout) and self._complete(key)
        return self._complete(key)

    def _complete(self, key: Key) -> bool:
        """Whether the store has all pages of an object. If not, the object is dropped."""
        found = self.catalog.get(key)
        if found is None:
            return False
        if all(map(self.tier.contains, found.page_keys())):
            return True
        self._drop([key])
        return False

    def unlock(self, keys: Iterable[Key]) -> None:
        """Take back one lock of each key."""
        for key in keys:
            self.catalog.unlock(key)

    def delete(self, keys: Iterable[Key]) -> int:
        """Delete objects without locks. Returns their number."""
        chosen = [
            key for key in dict.fromkeys(keys) if key not in self.catalog.locks and key in self
        ]
        self._drop(chosen)
        return len(chosen)

    def __contains__(self, key: Key) -> bool:
        return self.catalog.get(key) is not None

    def _drop(self, keys: Iterable[Key]) -> None:
        removed = [(key, self.catalog.remove(key)) for key in keys]
        gone = [(key, found) for key, found in removed if found is not None]
        for key, _ in gone:
            self.keys.forget(key)
        if gone:
            self.tier.remove([page for _, found in gone for page in found.page_keys()])
            self._report.deleted([key for key, _ in gone], [found.shape.size for _, found in gone])

    # -- stores and loads

    def begin(self, task: TransferTask) -> None:
        """Begin a task."""
        self.tasks[task.number] = task
        task.left = 1  # until every object has begun
        try:
            if not self.tier.trouble:
                begin = self._begin_save if task.save else self._begin_load
                begin(task)
        finally:
            self._count_down(task)

    def _begin_load(self, task: TransferTask) -> None:
        for index, (key, buffer) in enumerate(zip(task.keys, task.buffers, strict=True)):
            found = self.catalog.get(key)
            if found is None or buffer is None or found.shape != buffer.shape:
                continue
            transfer = PageTransfer(key, found, buffer, save=False)
            transfer.join(task, index)
            self.catalog.lock(key)
            self._loads.waiting.append(transfer)

    def _begin_save(self, task: TransferTask) -> None:
        keep = set(task.keys)
        for index, (key, buffer) in enumerate(zip(task.keys, task.buffers, strict=True)):
            if buffer is None:
                continue
            known = self.catalog.get(key)
            if known is not None and known.shape == buffer.shape and self._complete(key):
                task.ok[index] = True
                continue
            transfer = self._storing.get(key)
            if transfer is not None:
                if transfer.found.shape == buffer.shape:
                    transfer.join(task, index)
                continue
            wanted = stored_object(key, buffer.shape, self.tier.block_bytes)
            if self._make_space(key, wanted.pages, keep):
                transfer = PageTransfer(key, wanted, buffer, save=True)
                transfer.join(task, index)
                self._storing[key] = transfer
                self.catalog.reserved += wanted.pages
                self._saves.waiting.append(transfer)
        self.catalog.touch(task.keys)

    def _make_space(self, key: Key, pages: int, keep: set[Key]) -> bool:
        """Evict objects so that `pages` fit, an object of another layout under the same key
        first."""
        if key in self:
            if key in self.catalog.locks:
                return False
            self._drop([key])
        victims = self.catalog.victims(pages, keep)
        if victims is None:
            return False
        self._drop(victims)
        return True

    def fill(self) -> None:
        """Begin to move pages while there are free slots."""
        for lane in (self._loads, self._saves):
            self._fill(lane)

    def _fill(self, lane: TransferLane) -> None:
        while moves := lane.take_pages(BATCH):
            job = PageJob(lane, moves)
            keys = [move.transfer.found.page_key(move.number) for move in moves]
            views = [lane.view(move) for move in moves]
            try:
                if lane.save:
                    self.tier.submit_store(job, keys, views)
                else:
                    self.tier.submit_load(job, keys, views)
            except CacheClosed:
                self._pages_ended(job, [False] * len(moves))

    def job_ended(self, result: StorageResult) -> None:
        """A job of the store has ended."""
        if isinstance(result.job, PageJob):
            self._pages_ended(result.job, result.ok)
        digests = dict.fromkeys(key[:DIGEST_BYTES] for key in result.removed)
        gone = [self.catalog.key_of(digest) for digest in digests]
        self._drop([key for key in gone if key is not None])

    def _pages_ended(self, job: PageJob, ok: Sequence[bool]) -> None:
        lane = job.lane
        for move, good in zip(job.moves, ok, strict=True):
            transfer = move.transfer
            if good and not lane.save and not transfer.ended:
                lane.copy_out(move)
            lane.free.append(move.slot)
            transfer.in_flight -= 1
            transfer.failed |= not good
            if transfer.ended:
                if good and lane.save:
                    self._remove_stray(transfer, [move.number])
            elif not transfer.in_flight and transfer.all_begun:
                self._end(transfer, ok=not transfer.failed)

    def _remove_stray(self, transfer: PageTransfer, pages: Iterable[int]) -> None:
        """Remove pages of an object that was not stored completely."""
        found = self.catalog.get(transfer.key)
        stored = found is not None and found.digest == transfer.found.digest
        if not stored and transfer.key not in self._storing:
            self.tier.remove([transfer.found.page_key(number) for number in pages])

    def _end(self, transfer: PageTransfer, *, ok: bool) -> None:
        """Give the result of a transfer to its tasks."""
        transfer.ended = True
        size = transfer.found.shape.size
        if transfer.save:
            del self._storing[transfer.key]
            self.catalog.reserved -= transfer.found.pages
            if ok:
                self.catalog.add(transfer.key, transfer.found)
                self._stored.append((transfer.key, transfer.found.shape))
            else:
                self._remove_stray(transfer, range(transfer.begun))
        else:
            self.catalog.unlock(transfer.key)
            if not ok:
                self._complete(transfer.key)
        for task, index in transfer.waiters:
            task.ok[index] = ok
            task.nbytes += size if ok else 0
            self._count_down(task)

    def _count_down(self, task: TransferTask) -> None:
        task.left -= 1
        if not task.left:
            self._ended_tasks.append(task)

    def give_up(self, task: TransferTask) -> None:
        """End a task: its deadline has passed."""
        for transfer in task.transfers:
            if not transfer.ended:
                self._end(transfer, ok=False)
        if not task.left:  # it waits for the file of the keys
            self.end_task(task)

    # -- results

    def settle(self) -> None:
        """Report the results of this turn. A store task ends when its keys are in the file."""
        ended, self._ended_tasks = self._ended_tasks, []
        stored, self._stored = self._stored, []
        if stored:
            self._report.stored([key for key, _ in stored], [shape.size for _, shape in stored])
            self.keys.note(stored)
        records: list[Record] = []
        saves = []
        for task in ended:
            if task.save:
                self.catalog.touch(task.keys)
                records += self.keys.take(task.keys)
                saves.append(task)
            else:
                self.end_task(task)
        if records:
            whole = self._all_records() if self.keys.is_long(len(self.catalog)) else None
            self.keys.write(records, whole, lambda: self._post(partial(self._end_tasks, saves)))
        else:
            self._end_tasks(saves)

    def _all_records(self) -> list[Record]:
        return [(key, found.shape) for key, found in self.catalog.items()]

    def _end_tasks(self, tasks: Sequence[TransferTask]) -> None:
        for task in tasks:
            self.end_task(task)

    def end_task(self, task: TransferTask) -> None:
        """Report a task, once."""
        if self.tasks.pop(task.number, None) is not None:
            self._report.task_ended(task)
