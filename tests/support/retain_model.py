"""RETAIN in plain Python: a prefix cache of one tier that evicts by learned hit density.

The native policy must evict the same blocks in the same order. Everything here is found by
searching, without queues or counters kept ahead of need.

Words: the blocks that one request touched last, of one class, are a run. A run's class is what
was known when it was touched, its age is the time since. Runs whose blocks are evicted are kept
as ghost entries, so that the statistics do not depend on what the cache kept.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

BINS = 34
EDGES = [0.0] + [2.0 ** ((j - 1) / 2) for j in range(1, BINS + 1)]
"""Ages at which bins begin, in seconds: [0, 1), then two bins an octave."""

REFRESH = 32
"""Requests between two computations of the densities."""

PSEUDO = 10.0
"""Observations that the parent class counts for."""

Class = tuple[int, ...]
"""Values of the features, the most important one first. Without the last value it is the class's
parent. The empty class counts all runs."""


def step_of(value: float, steps: Sequence[float]) -> int:
    """How many steps a value reaches."""
    return sum(value >= step for step in steps)


PARTIAL: Class = (-1,)
"""The class of a partial last block."""


def classify(*, uses: int, gap: float, output: int) -> Class:
    """The class of a block.

    Args:
        uses: requests that used it, this one included.
        gap: seconds since the request that this one continues, -1 if it continues none.
        output: tokens that the request produced.
    """
    return (
        step_of(uses, (2, 3, 5, 9, 33)),
        step_of(gap, (0, 8, 32, 128)),
        step_of(output, (64, 256, 1024)),
    )


def prior(j: int) -> float:
    """Hazard of a bin before anything is known. It falls with the age, which gives LRU order."""
    return 1 - math.exp(-0.05 * (EDGES[j + 1] - EDGES[j]) / (EDGES[j] + 10))


class LifeTable:
    """For each class and bin: runs that reached it, and runs that returned in it."""

    def __init__(self) -> None:
        self.reached: Counter[tuple[Class, int]] = Counter()
        self.returned: Counter[tuple[Class, int]] = Counter()
        self.refresh()
        self._pseudo = 1.0  # until something is learned

    def count_reached(self, cls: Class, j: int) -> None:
        """A run's age entered a bin."""
        for length in range(len(cls) + 1):
            self.reached[cls[:length], j] += 1

    def count_returned(self, cls: Class, j: int) -> None:
        """A run was used again at an age in a bin."""
        for length in range(len(cls) + 1):
            self.returned[cls[:length], j] += 1

    def refresh(self) -> None:
        """Decide by the counts as they are now until the next call."""
        self._reached, self._returned = self.reached.copy(), self.returned.copy()
        self._pseudo = PSEUDO
        self._hazards: dict[Class, list[float]] = {}
        self._densities: dict[tuple[Class, int], float] = {}

    def hazard(self, cls: Class) -> list[float]:
        """For each bin the share of the runs at its beginning that return in it."""
        if cls not in self._hazards:
            above = self.hazard(cls[:-1]) if cls else [prior(j) for j in range(BINS)]
            self._hazards[cls] = [
                (self._returned[cls, j] + self._pseudo * above[j])
                / (self._reached[cls, j] + self._pseudo)
                for j in range(BINS)
            ]
        return self._hazards[cls]

    def density(self, cls: Class, j: int) -> float:
        """Hits per block and second from a bin on, up to the best age to give up at."""
        if (cls, j) not in self._densities:
            hazard, alive, hits, seconds, best = self.hazard(cls), 1.0, 0.0, 0.0, 0.0
            for k in range(j, BINS):
                returns = min(1.0, hazard[k])
                hits += alive * returns
                seconds += alive * (1 - returns / 2) * (EDGES[k + 1] - EDGES[k])
                alive *= 1 - returns
                best = max(best, hits / seconds)
            self._densities[cls, j] = best
        return self._densities[cls, j]

    def rises(self, cls: Class, j: int) -> bool:
        """Whether the next bin is worth more."""
        return j + 1 < BINS and self.density(cls, j + 1) > self.density(cls, j)


@dataclass(eq=False)
class Run:
    """Blocks that one request touched last, of one class.

    Attributes:
        blocks: in the order of the path.
        held: leading blocks that are resident.
        of: blocks of the request.
        order: later runs have higher numbers. Within a request the deepest run has the lowest.
        bin: the last one that was counted as reached.
    """

    blocks: list[int]
    cls: Class
    time: float
    of: int
    order: int
    held: int = 0
    bin: int = 0


class RetainModel:
    """A cache of one tier.

    Args:
        size: blocks.
        most_ghosts: runs without a resident block that are remembered at most.
        invert: evict the most valuable run, to test the guard.
    """

    def __init__(self, size: int, *, most_ghosts: int = 32768, invert: bool = False) -> None:
        self.size, self.most_ghosts, self.invert = size, most_ghosts, invert
        self.table = LifeTable()
        self.run_of: dict[int, Run] = {}  # of known blocks, resident or not
        self.uses: dict[int, int] = {}
        self.children: dict[int, int] = {}  # resident ones, by block
        self.parent: dict[int, int | None] = {}
        self.runs: dict[int, Run] = {}  # with a resident block, by order
        self.ghosts: dict[int, Run] = {}  # the others, by order
        self.evicted: list[int] = []
        self._ageing: list[tuple[float, int]] = []  # when a run leaves its bin, its order
        self._requests = self._orders = 0
        self.now = 0.0

    @property
    def resident(self) -> set[int]:
        """The blocks in the cache."""
        return {one for run in self.runs.values() for one in run.blocks[: run.held]}

    def request(
        self, ids: Sequence[int], now: float, output: int = 0, *, partial: bool = False
    ) -> int | None:
        """Serve one request from its beginning to its end.

        Args:
            ids: its path.
            now: seconds.
            output: tokens that it produces.
            partial: whether its last block is partial.

        Returns:
            The hits, None if the request is larger than the cache. It changes nothing then.
        """
        if len(ids) > self.size:
            return None
        self.now = max(self.now, now)
        self._grow_older()
        known = next((at for at, one in enumerate(ids) if one not in self.run_of), len(ids))
        hits = next((at for at, one in enumerate(ids[:known]) if not self._holds(one)), known)
        gap = self._gap(ids, known)
        self._take_back(ids[:known])
        self._make_room(len(ids))
        self._touch(ids, gap, output, partial=partial)
        self._forget()
        if self._requests % REFRESH == 0:
            self.table.refresh()
        self._requests += 1
        return hits

    def _holds(self, block: int) -> bool:
        run = self.run_of[block]
        return block in run.blocks[: run.held]

    def _grow_older(self) -> None:
        """Count the bins that runs entered, those of ghost entries too."""
        while self._ageing and self._ageing[0][0] <= self.now:
            _, order = heapq.heappop(self._ageing)
            run = self.runs.get(order) or self.ghosts.get(order)
            if run is None:
                continue
            run.bin += 1
            self.table.count_reached(run.cls, run.bin)
            self._age_later(run)

    def _age_later(self, run: Run) -> None:
        if run.bin + 1 < BINS:
            heapq.heappush(self._ageing, (run.time + EDGES[run.bin + 1], run.order))

    def _gap(self, ids: Sequence[int], known: int) -> float:
        """Seconds since the request that this one continues, -1 without one."""
        if not known:
            return -1.0
        last = self.run_of[ids[known - 1]]
        return self.now - last.time if 2 * known > last.of else -1.0

    def _take_back(self, known: Sequence[int]) -> None:
        """Take the known blocks from their runs, and count the returns of the runs."""
        for run in dict.fromkeys(self.run_of[one] for one in known):
            mine = [one for one in run.blocks if one in known]
            self.table.count_returned(run.cls, run.bin)
            for one in mine[: run.held]:
                self._leave(one)
            run.blocks = run.blocks[len(mine) :]
            run.held = max(0, run.held - len(mine))
            self._file(run)

    def _file(self, run: Run) -> None:
        """Keep a run where it belongs now."""
        self.runs.pop(run.order, None)
        self.ghosts.pop(run.order, None)
        if run.blocks:
            (self.runs if run.held else self.ghosts)[run.order] = run

    def _leave(self, block: int) -> None:
        parent = self.parent[block]
        if parent is not None:
            self.children[parent] -= 1

    def _make_room(self, need: int) -> None:
        """Evict until `need` blocks are free."""
        resident = sum(run.held for run in self.runs.values())
        while resident + need > self.size:
            run = self._victim()
            while resident + need > self.size and self._is_evictable(run):
                run.held -= 1
                resident -= 1
                self._leave(run.blocks[run.held])
                self.evicted.append(run.blocks[run.held])
            self._file(run)

    def _is_evictable(self, run: Run) -> bool:
        """Whether the last resident block of a run has no resident child."""
        return run.held > 0 and not self.children.get(run.blocks[run.held - 1], 0)

    def _victim(self) -> Run:
        """The run of lowest density. Of equal ones the oldest, or the youngest if the density
        rises with the age."""
        runs = [run for run in self.runs.values() if self._is_evictable(run)]
        sign = -1 if self.invert else 1

        def worth(run: Run) -> tuple[float, float, int]:
            density = self.table.density(run.cls, run.bin)
            newest = self.table.rises(run.cls, run.bin)
            return sign * density, -run.order if newest else run.order, run.order

        return min(runs, key=worth)

    def _touch(self, ids: Sequence[int], gap: float, output: int, *, partial: bool) -> None:
        """Make new runs of the whole path."""
        classes = []
        for at, one in enumerate(ids):
            self.uses[one] = self.uses.get(one, 0) + 1
            self.parent[one] = ids[at - 1] if at else None
            classes.append(classify(uses=self.uses[one], gap=gap, output=output))
            if at:
                self.children[ids[at - 1]] = self.children.get(ids[at - 1], 0) + 1
        if partial:
            classes[-1] = PARTIAL
        end = len(ids)
        while end:
            begin = end - 1
            while begin and classes[begin - 1] == classes[end - 1]:
                begin -= 1
            blocks, cls = list(ids[begin:end]), classes[end - 1]
            run = Run(blocks, cls, self.now, len(ids), self._orders, held=len(blocks))
            self._orders += 1
            self._file(run)
            self.run_of.update(dict.fromkeys(blocks, run))
            self.table.count_reached(cls, 0)
            self._age_later(run)
            end = begin

    def _forget(self) -> None:
        """Forget the oldest ghost entries beyond the limit, and how often their blocks were
        used."""
        while len(self.ghosts) > self.most_ghosts:
            run = self.ghosts.pop(min(self.ghosts))
            for one in run.blocks:
                del self.run_of[one], self.uses[one], self.parent[one]
                self.children.pop(one, None)
