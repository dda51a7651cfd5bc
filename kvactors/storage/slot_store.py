# ruff: noqa: D102 (each member is documented in `Backend`)
"""`SlotStore`: the interface of a store as the storage actors use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Expired, ReadReport, StoreStatistics, WriteReport
from kvactors.storage.counters import StoreCounters


class SlotStore(Protocol):
    """A store whose objects are read into host slots and written from them. See `Backend`, which is
    one for slots in the memory of this process. Ranks have separate slots and stores."""

    block_bytes: int
    exclusive: bool
    keeps_lineages: bool
    slot_trailer_bytes: int
    counters: StoreCounters

    @property
    def generation(self) -> int: ...

    @property
    def stuck(self) -> bool: ...

    @property
    def clear_pending(self) -> bool: ...

    async def open(self) -> None: ...

    async def attach(self, arena: Arena) -> None: ...

    async def close(self) -> None: ...

    def probe(self, keys: Sequence[bytes]) -> int | None: ...

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int: ...

    def take(self, keys: Sequence[bytes]) -> None: ...

    async def read_slots(
        self, keys: Sequence[bytes], arena: Any, slots: Sequence[int], expired: Expired
    ) -> ReadReport: ...

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Any,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport: ...

    async def remove(self, keys: Sequence[bytes]) -> None: ...

    async def clear(self, generation: int = 0) -> None: ...

    def keys(self) -> list[bytes]: ...

    def iter_keys(self) -> Iterator[bytes]: ...

    def count(self) -> int: ...

    def holds(self, key: bytes) -> bool: ...

    def take_removed(self) -> list[bytes]: ...

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None: ...

    def begin_paths(self) -> None: ...

    async def next_paths(self, most: int) -> list[PathPart] | None: ...

    def end_paths(self) -> None: ...

    def statistics(self) -> StoreStatistics: ...
