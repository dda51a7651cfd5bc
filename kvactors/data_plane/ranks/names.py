"""Keys that the stores of all ranks hold, kept by the leader and built page by page while a rank
joins.

No step handles more than PAGE_NAMES names or one shard, so that a rank with millions of objects
joins without keeping the loop. Ranks join one after another: beside the names that all ranks hold
there is one set of names at most, whose members are the same objects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from kvactors.data_plane.ranks.protocol import PAGE_NAMES
from kvactors.tables import SHARDS, ShardedDict
from kvactors.types import HASH_BYTES


class NameSet(ShardedDict[bytes]):
    """A set of names, each stored as its own value. The names are SHA-256 digests, so their first
    bytes make shards of one size, in the same order in every process."""

    __slots__ = ()

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        super().__init__()
        for name in names:
            self.add(name)

    def of(self, key: bytes) -> dict[bytes, bytes]:
        return self.shards[key[0] | (key[1] & 3) << 8]

    def __contains__(self, name: bytes) -> bool:
        return name in self.shards[name[0] | (name[1] & 3) << 8]  # `of`, for every key of a probe

    def __bool__(self) -> bool:
        return any(self.shards)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(list(shard) for shard in self.shards)

    def empty(self) -> Iterator[int]:
        """Take everything out, shard by shard. Yields after each the number of names it held."""
        for i, shard in enumerate(self.shards):
            self.shards[i] = {}
            yield len(shard)

    def add(self, name: bytes) -> None:
        self.of(name).setdefault(name, name)

    def discard(self, name: bytes) -> bool:
        """Remove a name. Returns whether it was in the set."""
        return self.of(name).pop(name, None) is not None


class RankNames:
    """The keys that the stores of all ranks hold. departed: keys removed from a store after all
    ranks had joined, and not reported yet. generations: how often each rank's store has been
    cleared. uneven: whether these differ: a clear did not reach every rank before its leader
    stopped. Then no key counts as held until all stores have been cleared."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.held = NameSet()
        self.departed = NameSet()
        self.generations: dict[int, int] = {}
        self.uneven = False
        self._known = False  # whether any rank has joined: before that every name may be held
        self._joining: Joining | None = None

    def __contains__(self, name: bytes) -> bool:
        return name in self.held

    def __len__(self) -> int:
        return len(self.held)

    def join(self, rank: int, generation: int) -> Joining:
        """Begin to receive a rank's names. Ends with `Joining.merge` or `Joining.abandon`."""
        others = {known for other, known in self.generations.items() if other != rank}
        self.uneven = self.uneven or len(others | {generation}) > 1
        base = NameSet() if self.uneven else self.held if self._known else None
        self._joining = Joining(self, rank, generation, base)
        return self._joining

    def add(self, name: bytes) -> None:
        self.held.add(name)

    def take(self, names: Iterable[bytes]) -> None:
        joining = self._joining
        for name in names:
            if self.held.discard(name):
                self.departed.add(name)
            if joining is not None:
                joining.seen.discard(name)

    def drop_all(self) -> NameSet:
        """Empty the set. Returns the former content, to be freed in slices. It does not count as
        departed: `TierCleared` reports the whole tier."""
        dropped, self.held = self.held, NameSet()
        self._known = True
        if self._joining is not None:
            self._joining.base, self._joining.seen = self.held, NameSet()
        return dropped

    def lost(self, most: int = PAGE_NAMES) -> list[bytes]:
        """At most so many names that are not held any more and have not been reported. Empty if
        there are none."""
        found: list[bytes] = []
        for shard in self.departed.shards:
            while shard and len(found) < most:
                name, _ = shard.popitem()
                if name not in self.held:
                    found.append(name)
            if len(found) == most:
                break
        return found

    @property
    def next_generation(self) -> int:
        """The generation that a clear of all stores leads to."""
        return max(self.generations.values(), default=0) + 1

    def have(self, ranks: Iterable[int], generation: int) -> None:
        self.generations |= dict.fromkeys(ranks, generation)
        self.uneven = len(set(self.generations.values())) > 1


@dataclass(eq=False)
class Joining:
    """One rank's names as they arrive. base: the names that the ranks before it hold, None for the
    first rank. seen: those of the base that this rank holds, too."""

    names: RankNames
    rank: int
    generation: int
    base: NameSet | None
    seen: NameSet = field(default_factory=NameSet)

    @property
    def wanted(self) -> bool:
        """Whether the rank's names make a difference."""
        return self.base is None or bool(self.base)

    def page(self, keys: bytes) -> None:
        seen, base = self.seen, self.base
        for i in range(0, len(keys), HASH_BYTES):
            name = keys[i : i + HASH_BYTES]
            if base is None:
                seen.add(name)
            elif (held := base.of(name).get(name)) is not None:
                seen.add(held)

    def merge(self) -> Iterator[int]:
        """Keep only keys that this rank holds, too. Yields after each slice the number of names it
        handled: the loop may run there."""
        names = self.names
        report = len(names.generations) == names.ranks
        for i in range(SHARDS):
            held, seen = names.held.shards[i], self.seen.shards[i]
            if report:
                names.departed.shards[i] |= {name: name for name in held.keys() - seen.keys()}
            names.held.shards[i] = seen
            yield len(held) + len(seen)
        names._joining, names._known = None, True
        names.have((self.rank,), self.generation)

    def abandon(self) -> None:
        """The rank is gone before its last page."""
        if self.names._joining is self:
            self.names._joining = None


async def in_slices(counts: Iterable[int], most: int = PAGE_NAMES) -> None:
    """Run an iterator that yields how many names each of its steps handled. Other tasks run after
    each `most` names."""
    handled = 0
    for count in counts:
        handled += count
        if handled >= most:
            handled = 0
            await asyncio.sleep(0)


def pages(names: Iterable[bytes], size: int = PAGE_NAMES) -> Iterator[tuple[bytes, bool]]:
    """Names in pages, at least one, each with whether it is the last."""
    source = iter(names)
    page = b"".join(islice(source, size))
    while True:
        following = b"".join(islice(source, size)) if len(page) == size * HASH_BYTES else b""
        yield page, not following
        if not following:
            return
        page = following
