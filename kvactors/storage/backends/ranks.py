"""The stores of ranks in other processes, as one: an object is there if every rank has its share of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from kvactors.device.arena import Arena
from kvactors.ranks.group import RankGroup
from kvactors.ranks.protocol import Answer, StoreObjects
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.messages import Outcome
from kvactors.units import join_keys, split_keys

BADNESS = (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.NO_SPACE, Outcome.LATE, Outcome.CORRUPT, Outcome.UNAVAILABLE)
"""Outcomes from best to worst: the whole is as its worst share."""


class RankBackend(Backend):
    """exclusive: as its ranks' stores. shared: whether these are a pool of many nodes', which must be asked and for which nobody answers alone.
    seconds: what a batch may take. Slots are numbers here: the bytes never come to this process."""

    def __init__(
        self, group: RankGroup, fingerprint: bytes, block_bytes: int, seconds: float, *, exclusive: bool, shared: bool = False
    ) -> None:
        super().__init__(fingerprint, block_bytes)
        self.exclusive = exclusive
        self.shared = shared
        self.group = group
        self.seconds = seconds
        self._held: dict[bytes, None] = {}
        self._departed: set[bytes] = set()  # until somebody has told of it
        self._said: dict[int, set[bytes]] = {}  # by rank, until all were heard
        self.uncleared = False
        self._clears = 0
        group.stored = self._stored

    def _stored(self, rank: int, keys: set[bytes]) -> None:
        """A rank was admitted, and says what its store holds. At the beginning, what all hold is here; later, nothing that it lacks is."""
        self.take([key for key in self._held if key not in keys])
        if len(self._said) < self.group.config.count:
            self._said[rank] = keys
            if len(self._said) == self.group.config.count:
                self._held.update(dict.fromkeys(set.intersection(*self._said.values())))
                self._said = {one: set() for one in self._said}  # the names themselves are of no more use

    def lost(self) -> list[bytes]:
        """See `Backend.lost`."""
        departed, self._departed = self._departed, set()
        return [key for key in departed if key not in self._held]

    def told(self, keys: Iterable[bytes]) -> None:
        """See `Backend.told`."""
        self._departed.difference_update(keys)

    @property
    def era(self) -> int:
        """See `Backend.era`."""
        return self.group.era

    async def open(self) -> None:
        """The ranks open their stores themselves."""

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`."""
        if not self.group.healthy:
            return 0
        if self.shared:
            return None
        return next((i for i, key in enumerate(keys) if key not in self._held), len(keys))

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`: the shortest run of all ranks."""
        if expired():
            return 0
        outcomes, _ = await self._all("ask", keys, count=False)
        return next((i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK), len(keys))

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""
        self._departed.update(key for key in keys if self._held.pop(key, self) is None)

    async def _all(
        self,
        kind: Literal["read", "write", "ask", "remove"],
        keys: Sequence[bytes],
        slots: Sequence[int] = (),
        *,
        count: bool = True,
    ) -> tuple[bytes, list[bytes]]:
        """One outcome a key for all ranks together, and the names that any of them does not hold any more."""
        joined = join_keys(keys)
        answers = await self.group.scatter(lambda op: StoreObjects(op, kind, joined, tuple(slots), self.seconds))
        worst = [0] * len(keys)
        gone: set[bytes] = set()
        for answer in answers:
            for i, outcome in enumerate(outcomes_of(answer, len(keys))):
                worst[i] = max(worst[i], BADNESS.index(Outcome(outcome)))
            gone |= set(split_keys(answer.gone)) if answer is not None else set()
        outcomes = bytes(BADNESS[i] for i in worst)
        if count:
            self.saw(outcomes)
        return outcomes, list(gone)

    async def read_slots(self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired) -> ReadReport:
        """See `Backend.read_slots`."""
        if expired():
            return ReadReport(bytes([Outcome.LATE]) * len(keys), [])
        outcomes, gone = await self._all("read", keys, slots)
        self.reads += outcomes.count(Outcome.OK)
        bad = {key for key, o in zip(keys, outcomes, strict=True) if o in (Outcome.MISS, Outcome.CORRUPT)}
        held = [key for key in {*gone, *bad} if key in self._held]
        self.take(held)
        return ReadReport(outcomes, held)

    async def write_slots(self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired) -> WriteReport:
        """See `Backend.write_slots`."""
        if expired():
            return WriteReport(bytes([Outcome.LATE]) * len(keys), [])
        era = self.era
        if self.uncleared:
            await self.clear()
        if self.uncleared or era != self.era:
            return WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        clears = self._clears
        outcomes, gone = await self._all("write", keys, slots)
        self.writes += outcomes.count(Outcome.OK)
        evicted = [key for key in gone if key in self._held]
        self.evicted += len(evicted)
        self.take(evicted)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.EXISTS) and key not in gone and clears == self._clears and not self.shared:
                self._held[key] = None
        return WriteReport(outcomes, evicted)

    async def read(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired) -> ReadReport:
        """See `Backend.read`: memory of this process is not within the ranks' reach."""
        return ReadReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])

    async def write(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired) -> WriteReport:
        """See `Backend.write`: memory of this process is not within the ranks' reach."""
        return WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        self.take(keys)
        if keys:
            await self._all("remove", keys)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. While a rank does not answer, its objects stay, and nothing is written until it could be cleared as well."""
        self.take(list(self._held))
        self.uncleared = True  # until all have said so
        self._clears += 1  # what is being written now is emptied, too
        answers = await self.group.scatter(lambda op: StoreObjects(op, "clear"))
        self.uncleared = None in answers

    async def close(self) -> None:
        """The ranks close their stores themselves."""

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return list(self._held)

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return key in self._held


def outcomes_of(answer: Answer | None, keys: int) -> bytes:
    """A rank's outcomes; a rank without an answer was not available."""
    known = answer is not None and len(answer.outcomes) == keys and all(o < len(Outcome) for o in answer.outcomes)
    return answer.outcomes if answer is not None and known else bytes([Outcome.UNAVAILABLE]) * keys
