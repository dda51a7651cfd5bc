"""The decisions over LMCache's objects: look-ups, stores, loads, evictions.

LMCache's threads hand calls over and take results. The event loop of the store makes every
decision, so nothing is shared. It never waits for the file system: the store and the file of the
keys have their own threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeVar

from kvactors.actor.log import described, get_logger
from kvactors.errors import CacheClosed
from kvactors.integrations.lmcache.catalog import (
    DIGEST_BYTES,
    Key,
    KeyCatalog,
    KeyFile,
    ObjectShape,
    Record,
    StoredObject,
    is_serialized,
    stored_object,
)
from kvactors.native import copy_bytes
from kvactors.tier_cache import SlotMemory, StorageResult, StorageTier

T = TypeVar("T")

log = get_logger()

# -- Tasks of LMCache, the objects that they move, and the staging memory of their pages.
#
# Pages pass through memory of kvactors. A read or write that hangs in the file system keeps that
# memory, and none of LMCache's: its task can fail in time, and LMCache can use its memory again.


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
        timer: of the deadline.
        ok: one bool a key, valid when the task has ended.
    """

    number: int
    keys: Sequence[Key]
    buffers: Sequence[Buffer | None]
    deadline: float
    save: bool = field(kw_only=True)
    ok: list[bool] = field(init=False)
    left: int = 0
    nbytes: int = 0
    timer: asyncio.TimerHandle | None = None
    transfers: list[PageTransfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ok = [False] * len(self.keys)


@dataclass(eq=False, slots=True)
class PageTransfer:
    """The move of one object between LMCache's memory and the store.

    Attributes:
        waiters: tasks that end with it, and the object's position in each.
        ended: whether the tasks have the result. LMCache's memory is not used any more.
    """

    key: Key
    found: StoredObject
    buffer: Buffer
    save: bool = field(kw_only=True)
    waiters: list[tuple[TransferTask, int]] = field(default_factory=list)
    begun: int = 0
    in_flight: int = 0
    failed: bool = False
    ended: bool = False

    def join(self, task: TransferTask, index: int) -> None:
        self.waiters.append((task, index))
        task.transfers.append(self)
        task.left += 1

    @property
    def all_begun(self) -> bool:
        return self.ended or self.failed or self.begun == self.found.pages

    def page(self, number: int, page_bytes: int) -> tuple[int, int]:
        """Address and bytes of a page in LMCache's memory."""
        start = number * page_bytes
        return self.buffer.address + start, min(page_bytes, self.found.shape.size - start)


class PageMove(NamedTuple):
    """A page in a slot of the staging memory."""

    transfer: PageTransfer
    number: int
    slot: int


class TransferLane:
    """Transfers of one direction, and their part of the staging memory."""

    def __init__(self, memory: SlotMemory, slots: range, *, save: bool) -> None:
        self.save = save
        self.waiting: deque[PageTransfer] = deque()
        self.free = list(slots)
        self._memory = memory

    def take_pages(self, most: int) -> list[PageMove]:
        """Begin to move pages, at most `most`. Pages to store are copied into their slots."""
        moves: list[PageMove] = []
        while self.free and self.waiting and len(moves) < most:
            transfer = self.waiting[0]
            if transfer.all_begun:
                self.waiting.popleft()
                continue
            move = PageMove(transfer, transfer.begun, self.free.pop())
            transfer.begun += 1
            transfer.in_flight += 1
            if self.save:
                self._copy_in(move)
            moves.append(move)
        return moves

    def view(self, move: PageMove) -> memoryview:
        return self._memory.view(move.slot)

    def _copy_in(self, move: PageMove) -> None:
        size = self._memory.block_bytes
        address, nbytes = move.transfer.page(move.number, size)
        copy_bytes(self._address(move), address, nbytes)
        if nbytes < size:
            self.view(move)[nbytes:] = bytes(size - nbytes)

    def copy_out(self, move: PageMove) -> None:
        address, nbytes = move.transfer.page(move.number, self._memory.block_bytes)
        copy_bytes(address, self._address(move), nbytes)

    def _address(self, move: PageMove) -> int:
        return self._memory.address + move.slot * self._memory.stride


BATCH = 16  # pages of one job of the store


class TransferReport(Protocol):
    """Takes results and changes, in the store's thread. Objects that were found are locked."""

    def task_ended(self, task: TransferTask) -> None: ...
    def looked_up(self, number: int, found: list[bool]) -> None: ...
    def stored(self, keys: list[Key], sizes: list[int]) -> None: ...
    def accessed(self, keys: list[Key]) -> None: ...
    def deleted(self, keys: list[Key], sizes: list[int]) -> None: ...


class ObjectStore:
    """The objects and the tasks in flight. `post`, `ask` and `stop` are called in any thread, the
    others on the event loop of the store. Half of the staging memory is for stores and half for
    loads."""

    def __init__(
        self,
        tier: StorageTier,
        keys: KeyFile,
        catalog: KeyCatalog,
        report: TransferReport,
        staging: SlotMemory,
    ) -> None:
        self.tier = tier
        self.catalog = catalog
        self.tasks: dict[int, TransferTask] = {}
        self.keys = keys
        self._report = report
        self.memory = staging
        half = staging.num_slots // 2
        self._loads = TransferLane(self.memory, range(half), save=False)
        self._saves = TransferLane(self.memory, range(half, staging.num_slots), save=True)
        self.running = True
        self._thread = 0
        self._turns = False  # whether a turn is due
        self._storing: dict[Key, PageTransfer] = {}
        self._stored: list[Record] = []  # in this turn
        self._ended_tasks: list[TransferTask] = []  # in this turn

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
        """Fail the tasks in flight, and write the keys. Returns whether no result is reported any
        more, `limit` seconds at most after the call."""
        if not self.ask(self._stop, limit, not self.running):
            return False
        self.keys.finish(self.catalog.records(), limit)
        return True

    # -- turns

    def _run(self, call: Callable[[], object]) -> None:
        self._thread = get_ident()
        self._contain(call)
        if not self.running:
            self._give_up_all()
        elif self.tasks:
            self._take_turn()

    def _take_turn(self) -> None:
        """What calls and results have begun goes on, in one turn for those that come together."""
        if not self._turns and get_ident() == self._thread:  # else the tier closes
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turns = False
        for result in self.tier.poll():
            self._contain(partial(self.job_ended, result))
        self._contain(self.fill)
        self._contain(self.settle)

    def _stop(self) -> bool:
        self.running = False
        return True

    def _give_up_all(self) -> None:
        for task in list(self.tasks.values()):
            self._contain(partial(self.give_up, task))
        self._contain(self.settle)
        for task in list(self.tasks.values()):
            self._contain(partial(self.end_task, task))

    @staticmethod
    def _contain(call: Callable[[], object]) -> None:
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
            self.keys.unwritten.pop(key, None)
        if gone:
            self.tier.remove([page for _, found in gone for page in found.page_keys()])
            self._report.deleted([key for key, _ in gone], [found.shape.size for _, found in gone])

    # -- stores and loads

    def begin(self, task: TransferTask) -> None:
        self.tasks[task.number] = task
        loop = asyncio.get_running_loop()
        task.timer = loop.call_at(task.deadline, self._run, partial(self.give_up, task))
        task.left = 1  # until every object has begun
        try:
            if not self.tier.trouble:
                begin = self._begin_save if task.save else self._begin_load
                begin(task)
        finally:
            self._count_down(task)

    def _begin_load(self, task: TransferTask) -> None:
        for index, (key, buffer) in enumerate(zip(task.keys, task.buffers, strict=True)):
            found = self.catalog.objects.get(key)
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
            known = self.catalog.objects.get(key)
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

    def fill(self) -> None:
        for lane in (self._loads, self._saves):
            submit = self.tier.submit_store if lane.save else self.tier.submit_load
            while moves := lane.take_pages(BATCH):
                keys = [move.transfer.found.page_key(move.number) for move in moves]
                try:
                    job = submit(tuple(moves), keys, [lane.view(move) for move in moves])
                except CacheClosed:
                    self._pages_ended(moves, [False] * len(moves))
                else:
                    job.add_done_callback(lambda _: self._take_turn())

    def job_ended(self, result: StorageResult) -> None:
        if isinstance(result.job, tuple):
            self._pages_ended(result.job, result.ok)
        digests = {key[:DIGEST_BYTES] for key in result.removed}
        if digests:
            known = self.catalog.objects.items()
            self._drop([key for key, found in known if found.digest in digests])

    def _pages_ended(self, moves: Sequence[PageMove], ok: Sequence[bool]) -> None:
        for move, good in zip(moves, ok, strict=True):
            transfer = move.transfer
            lane = self._saves if transfer.save else self._loads
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
        found = self.catalog.objects.get(transfer.key)
        stored = found is not None and found.digest == transfer.found.digest
        if not stored and transfer.key not in self._storing:
            self.tier.remove([transfer.found.page_key(number) for number in pages])

    def _end(self, transfer: PageTransfer, *, ok: bool) -> None:
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
            self.keys.unwritten.update(stored)
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
            whole = self.catalog.records() if self.keys.is_long(len(self.catalog.objects)) else None
            self.keys.write(records, whole, lambda: self.post(partial(self._end_tasks, saves)))
        else:
            self._end_tasks(saves)

    def _end_tasks(self, tasks: Sequence[TransferTask]) -> None:
        for task in tasks:
            self.end_task(task)

    def end_task(self, task: TransferTask) -> None:
        if self.tasks.pop(task.number, None) is not None:
            if task.timer is not None:
                task.timer.cancel()
            self._report.task_ended(task)


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except Exception as error:
        answer.set_exception(error)
