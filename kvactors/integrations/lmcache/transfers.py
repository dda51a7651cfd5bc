"""Tasks of LMCache, the objects that they move, and the staging memory of their pages.

Pages pass through memory of kvactors. A read or write that hangs in the file system keeps that
memory, and none of LMCache's: its task can fail in time, and LMCache can use its memory again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvactors.integrations.lmcache.catalog import Key, ObjectShape, StoredObject
from kvactors.native import copy_bytes
from kvactors.tier_cache import SlotMemory


class Buffer(NamedTuple):
    """Memory of LMCache for one object.

    Attributes:
        owner: keeps the memory alive.
    """

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
        left: objects that are being moved.
    """

    number: int
    keys: Sequence[Key]
    buffers: Sequence[Buffer | None]
    deadline: float
    save: bool = field(kw_only=True)
    ok: list[bool] = field(init=False)
    left: int = 0
    nbytes: int = 0
    transfers: list[PageTransfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ok = [False] * len(self.keys)


@dataclass(eq=False, slots=True)
class PageTransfer:
    """The move of one object between LMCache's memory and the store.

    Attributes:
        waiters: tasks that end with it, and the object's position in each.
        begun: pages whose move has begun.
        in_flight: pages whose move has begun and not ended.
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
        """Whether no further page is to be moved."""
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


@dataclass(eq=False, slots=True)
class PageJob:
    """A batch for the store."""

    lane: TransferLane
    moves: list[PageMove]


class TransferLane:
    """Transfers of one direction, and their part of the staging memory."""

    def __init__(self, memory: SlotMemory, slots: range, *, save: bool) -> None:
        self.save = save
        self.waiting: deque[PageTransfer] = deque()
        self.free = list(slots)
        self._memory = memory

    def take_pages(self, most: int) -> list[PageMove]:
        """Begin to move pages, as many as there are free slots and at most `most`. Pages to store
        are copied into their slots."""
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
        """Copy a page that was read to LMCache's memory."""
        address, nbytes = move.transfer.page(move.number, self._memory.block_bytes)
        copy_bytes(address, self._address(move), nbytes)

    def _address(self, move: PageMove) -> int:
        return self._memory.address + move.slot * self._memory.stride
