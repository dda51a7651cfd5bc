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
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

BINS = 34
EDGES = [0.0] + [2.0 ** ((j - 1) / 2) for j in range(1, BINS + 1)]
"""Ages at which bins begin, in seconds: [0, 1), then two bins an octave."""

WIDTHS = np.diff(EDGES)

REFRESH = 32
"""Requests between two computations of the densities."""

PSEUDO = 10.0
"""Observations that the parent class counts for."""

LOOK = 32
"""Runs of a class in which one looks for the edge of the LRU."""

NEAR = 1e-9
"""Densities that differ by less, as a share, are equal but for rounding errors."""

Class = tuple[int, ...]
"""Values of the features, the most important one first. Without the last value it is the class's
parent. The empty class counts all runs."""


def step_of(value: float, steps: Sequence[float]) -> int:
    """How many steps a value reaches."""
    return sum(value >= step for step in steps)


PARTIAL: Class = (-1,)
"""The class of a partial last block, where partial blocks are cached."""

LAST = -2
"""First value of the classes of last blocks, which have separate ones."""


class Variant(NamedTuple):
    """Choices that the described algorithm leaves open.

    Attributes:
        last: whether the last block of a path has its own classes.
        half_life: requests after which an observation counts half, 0 for never.
        guarded: whether the policy keeps near LRU while LRU hits more.
    """

    last: bool
    half_life: float
    guarded: bool


DESCRIBED = Variant(last=False, half_life=0, guarded=False)
SHIPPED = Variant(last=True, half_life=16384, guarded=True)


HINTED = 100
"""Added to a hint's number in place of the gap."""


def classify(
    *, uses: int, gap: float, output: int, ends: bool = False, returns_in: float = -1
) -> Class:
    """The class of a block.

    Args:
        uses: requests that used it, this one included.
        gap: seconds since the request that this one continues, -1 if it continues none.
        output: tokens that the request produced.
        ends: the hint that the session ends.
        returns_in: the hint in how many seconds it continues, -1 without.
    """
    if ends or returns_in >= 0:
        hint = 0 if ends else 1 + step_of(returns_in, (8, 32, 128, 512))
        return (step_of(uses, (2, 3, 5, 9, 33)), HINTED + hint)
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

    def __init__(self, half_life: float = 0) -> None:
        self.reached: Counter[tuple[Class, int]] = Counter()
        self.returned: Counter[tuple[Class, int]] = Counter()
        self.weight = 1.0  # of an observation
        self._growth = 2 ** (1 / half_life) if half_life else 1.0
        self._hazards: dict[Class, list[float]] = {}
        self._decided: dict[Class, list[float]] = {}  # hazards that the densities follow from
        self._densities: dict[tuple[Class, int], float] = {}  # those that were asked for

    def one_more_request(self) -> None:
        """Later observations count more, which is the same as earlier ones counting less."""
        self.weight *= self._growth

    def count_reached(self, cls: Class, j: int) -> None:
        """A run's age entered a bin."""
        for length in range(len(cls) + 1):
            self.reached[cls[:length], j] += self.weight  # type: ignore[assignment]

    def count_returned(self, cls: Class, j: int) -> None:
        """A run was used again at an age in a bin."""
        for length in range(len(cls) + 1):
            self.returned[cls[:length], j] += self.weight  # type: ignore[assignment]

    def add(self, cls: Class) -> None:
        """Compute the densities of a class that is met for the first time, from what its parent has
        observed until now."""
        if cls in self._hazards:
            return
        if cls:
            self.add(cls[:-1])
            self._hazards[cls[:-1]] = self._hazards_of(cls[:-1])
        self._compute(cls)

    def refresh(self) -> None:
        """Compute the densities of all classes from the counts, parents first."""
        self._densities.clear()
        for cls in sorted(self._hazards, key=len):
            self._compute(cls)

    def _compute(self, cls: Class) -> None:
        self._hazards[cls] = self._decided[cls] = self._hazards_of(cls)

    def _hazards_of(self, cls: Class) -> list[float]:
        """From the counts of a class, and its parent's hazard as some observations more."""
        above = self._hazards[cls[:-1]] if cls else [prior(j) for j in range(BINS)]
        pseudo = PSEUDO * self.weight
        return [
            (self.returned[cls, j] + pseudo * above[j]) / (self.reached[cls, j] + pseudo)
            for j in range(BINS)
        ]

    def chance_of_return(self, cls: Class, first: int, last: int) -> float:
        """Of a run that has reached the first bin, until the end of the last one."""
        stays = 1.0
        for hazard in self._hazards[cls][first : last + 1]:
            stays *= 1 - min(1.0, hazard)
        return 1 - stays

    def density(self, cls: Class, j: int) -> float:
        """Hits per block and second from a bin on, up to the best age to give up at."""
        self.add(cls)
        if (cls, j) not in self._densities:
            returns = np.minimum(self._decided[cls][j:], 1.0)
            alive = np.cumprod(np.concatenate(([1.0], 1 - returns[:-1])))
            hits, seconds = alive * returns, alive * (1 - returns / 2) * WIDTHS[j:]
            self._densities[cls, j] = float(np.max(np.cumsum(hits) / np.cumsum(seconds)))
        return self._densities[cls, j]


@dataclass(eq=False)
class Run:
    """Blocks that one request touched last, of one class.

    Attributes:
        blocks: in the order of the path.
        held: leading blocks that are resident.
        of: blocks of the request.
        order: later runs have higher numbers. Within a request the deepest run has the lowest.
        bin: the last one that was counted as reached.
        risk: of its blocks that the cache lacks and an LRU has, see `Guard`.
    """

    blocks: list[int]
    cls: Class
    time: float
    of: int
    order: int
    held: int = 0
    bin: int = 0
    risk: int = 128


class Guard:
    """Trust in the statistics: a few blocks, a small share of those looked up, and hits more than
    LRU's.

    An exact LRU of as many blocks is computed beside the cache. The statistics choose the victim
    while the cache lacks few of its blocks for the trust there is, else among the blocks that the
    LRU does not have. Where there is none, it is the oldest block.
    """

    INITIAL, GRANTED = 4.0, 0.0013  # blocks, and of all blocks
    SLOPE = 17.0  # blocks that it may lack for each hit of trust, once there is evidence
    STRICT, EXPERIENCE = 8000, 100_000  # blocks looked up without evidence, and until all of it
    MISSED, WINDOW = 0.05, 1500  # share of the last blocks that the LRU had before
    CERTAIN, CAUTION = 128, 4.0  # a sure hit, and the factor of a chance

    def __init__(self) -> None:
        self.stack: dict[int, Run] = {}  # blocks by their last use, the oldest first
        self.trust, self._missed = self.INITIAL, 0.0
        self.looked_up = 0

    def shadow(self, blocks: int) -> list[int]:
        """The content of an LRU of so many blocks, the newest first."""
        return list(islice(reversed(self.stack), blocks))

    def edge(self, blocks: int) -> Run | None:
        """The run of the oldest block of an LRU of so many blocks."""
        shadow = self.shadow(blocks)
        return self.stack[shadow[-1]] if shadow else None

    def risk(self, run: Run, table: LifeTable, blocks: int) -> int:
        """The chance that a block costs a hit while the LRU has it, with a margin."""
        edge = self.edge(blocks)
        if edge is None:
            return self.CERTAIN
        chance = table.chance_of_return(run.cls, run.bin, edge.bin)
        return max(1, math.ceil(self.CERTAIN * min(1.0, self.CAUTION * chance)))

    def trusts(self, resident: set[int], risk: int) -> bool:
        """Whether the statistics may choose a victim of this risk."""
        displaced = set(self.shadow(len(resident))) - resident
        evidence = min(1.0, self._missed / self.WINDOW / self.MISSED)
        evidence *= min(1.0, max(0, self.looked_up - self.STRICT) / self.EXPERIENCE)
        trust = max(0.0, self.trust)
        risks = sum(self.stack[one].risk for one in displaced)
        return (
            len(displaced) < int((1 + (self.SLOPE - 1) * evidence) * trust)
            and risks + risk <= self.CERTAIN * trust
        )

    def request(
        self, ids: Sequence[int], runs: dict[int, Run], *, known: int, hits: int, sizes: Sizes
    ) -> None:
        """Compare the hits of a request with those of the LRU.

        Args:
            ids: its path.
            runs: of its blocks.
            known: leading blocks that an earlier request had.
            hits: of the cache.
            sizes: resident blocks before the request and after it.
        """
        shadow = set(self.shadow(sizes.before))
        others = next((at for at, one in enumerate(ids) if one not in shadow), len(ids))
        self.trust += self.GRANTED * len(ids) + hits - others
        self.trust = min(self.trust, float(sizes.after))
        self._missed += max(0, known - others)
        self._missed *= self.WINDOW / (self.WINDOW + len(ids))
        self.looked_up += len(ids)
        for one in reversed(ids):
            self.stack.pop(one, None)
            self.stack[one] = runs[one]


class Sizes(NamedTuple):
    """Resident blocks before and after a request."""

    before: int
    after: int


class Choice(NamedTuple):
    """The run that an eviction shortens.

    Attributes:
        run: None if there is none.
        outside: whether it was chosen among the blocks that an LRU does not have.
        risk: see `Guard`.
    """

    run: Run | None = None
    outside: bool = False
    risk: int = Guard.CERTAIN


class RetainModel:
    """A cache of one tier.

    Args:
        size: blocks.
        most_ghosts: runs without a resident block that are remembered at most.
        invert: evict the most valuable run, to test the guard.
        variant: of the algorithm.
        first: requests that are only observed. The victim is that of LRU.
    """

    def __init__(
        self,
        size: int,
        *,
        most_ghosts: int = 32768,
        invert: bool = False,
        variant: Variant = DESCRIBED,
        first: int = 0,
    ) -> None:
        self.first = first
        self.size, self.most_ghosts, self.invert = size, most_ghosts, invert
        self.variant, self.guard = variant, Guard()
        self.table = LifeTable(variant.half_life)
        self.run_of: dict[int, Run] = {}  # of known blocks, resident or not
        self.uses: dict[int, int] = {}
        self.children: dict[int, int] = {}  # resident ones, by block
        self.parent: dict[int, int | None] = {}
        self.runs: dict[int, Run] = {}  # with a resident block, by order
        self.ghosts: dict[int, Run] = {}  # the others, by order
        self.evicted: list[int] = []
        self.compared: Sequence[int] = ()  # evicted by the cache that the model is compared with
        self.count = 0  # resident blocks
        self._ageing: list[tuple[float, int]] = []  # when a run leaves its bin, its order
        self._requests = self._orders = 0
        self.now = 0.0
        self._pinned: set[int] = set()  # hit by the request that is served
        self._choice = Choice()

    @property
    def resident(self) -> set[int]:
        """The blocks in the cache."""
        return {one for run in self.runs.values() for one in run.blocks[: run.held]}

    def request(
        self,
        ids: Sequence[int],
        now: float,
        output: int = 0,
        *,
        partial: bool = False,
        ends: bool = False,
        returns_in: float = -1,
    ) -> int | None:
        """Serve one request from its beginning to its end.

        Args:
            ids: its path.
            now: seconds.
            output: tokens that it produces.
            partial: whether its last block is partial.
            ends, returns_in: hints, see `classify`.

        Returns:
            The hits, None if the request is larger than the cache. It changes nothing then.
        """
        if len(ids) > self.size:
            return None
        self.now = max(self.now, now)
        self._grow_older()
        known = next((at for at, one in enumerate(ids) if one not in self.run_of), len(ids))
        hits = next((at for at, one in enumerate(ids[:known]) if not self._holds(one)), known)
        gap, before = self._gap(ids, known), self.count
        self._pinned = set(ids[:hits])
        self._take_back(ids[:known])
        self._choice = Choice()
        self._make_room(len(ids))
        hints = {"ends": ends, "returns_in": returns_in}
        self._touch(ids, gap, output, partial=partial, hints=hints)
        self._forget()
        if self.variant.guarded:
            sizes = Sizes(before, self.count)
            self.guard.request(ids, self.run_of, known=known, hits=hits, sizes=sizes)
        if self._requests % REFRESH == 0:
            self.table.refresh()
        self.table.one_more_request()
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
            self.count -= min(run.held, len(mine))
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
        while self.count + need > self.size:
            run = self._victim()
            if run is self._choice.run and not self._choice.outside:
                run.risk = self._choice.risk
            run.held -= 1
            self.count -= 1
            self._leave(run.blocks[run.held])
            self.evicted.append(run.blocks[run.held])
            self._file(run)

    def _is_evictable(self, run: Run) -> bool:
        """Whether the last resident block of a run has no resident child."""
        return run.held > 0 and not self.children.get(run.blocks[run.held - 1], 0)

    def _victim(self) -> Run:
        """The run that the statistics choose, as far as they are trusted. Before `first` requests,
        and where they have no choice, the oldest run of all."""
        runs = [run for run in self.runs.values() if self._is_evictable(run)]
        if not self.variant.guarded:
            return self._best(runs)
        if self._requests >= self.first:
            self._choose(runs)
            if self._choice.run is not None:
                return self._choice.run
        return min(runs, key=lambda run: run.order)

    def _choose(self, runs: list[Run]) -> None:
        """Go on with the run that was chosen before, or choose another one."""
        there = self.resident | self._pinned
        edge = self.guard.edge(len(there))
        run, outside, risk = self._choice
        if run is not None and self._is_evictable(run):
            if outside and edge is not None and run.order < edge.order:
                return
            if not outside and self.guard.trusts(there, risk):
                return
        else:
            outside, run = True, None
        if outside or run is None:
            run = self._best(runs)
            risk = self.guard.risk(run, self.table, len(there))
            if self.guard.trusts(there, risk):
                self._choice = Choice(run, outside=False, risk=risk)
                return
        older = [one for one in runs if edge is not None and one.order < edge.order]
        self._choice = Choice(
            self._best(older, edge.bin if edge else 0) if older else None, outside=True
        )

    def _best(self, runs: list[Run], nearest: int = -1) -> Run:
        """The oldest run of the class and bin of lowest density, or the youngest if the density
        rises with the age. Of the bin `nearest` the youngest one, as far as one looks."""
        bins: dict[tuple[Class, int], list[Run]] = {}
        for run in sorted(runs, key=lambda run: run.order):
            bins.setdefault((run.cls, run.bin), []).append(run)
        lowest = min(self._worth(*one) for one in bins)
        near = [one for one in bins if self._worth(*one) <= lowest + NEAR * abs(lowest)]
        choices = []
        for cls, j in sorted(near, key=lambda one: bins[one][0].order):
            rises = j + 1 < BINS and self._worth(cls, j + 1) > self._worth(cls, j)
            at = min(LOOK, len(bins[cls, j]) - 1) if j == nearest else -1 if rises else 0
            choices.append(bins[cls, j][at])
        if near[0][1] == nearest:
            choices.sort(key=lambda run: -run.order)
        return self._as_compared(choices)

    def _as_compared(self, choices: list[Run]) -> Run:
        """Among runs that differ by rounding errors the one that the compared cache chose."""
        at = len(self.evicted)
        if at < len(self.compared):
            for run in choices:
                if run.blocks[run.held - 1] == self.compared[at]:
                    return run
        return choices[0]

    def _worth(self, cls: Class, j: int) -> float:
        """The density, or its opposite to evict the most valuable run."""
        density = self.table.density(cls, j)
        return -density if self.invert else density

    def _touch(
        self, ids: Sequence[int], gap: float, output: int, *, partial: bool, hints: dict[str, Any]
    ) -> None:
        """Make new runs of the whole path."""
        classes = []
        for at, one in enumerate(ids):
            self.uses[one] = self.uses.get(one, 0) + 1
            self.parent[one] = ids[at - 1] if at else None
            classes.append(classify(uses=self.uses[one], gap=gap, output=output, **hints))
            if at:
                self.children[ids[at - 1]] = self.children.get(ids[at - 1], 0) + 1
        if partial:
            classes[-1] = PARTIAL
        elif self.variant.last:
            classes[-1] = (LAST, *classes[-1])
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
            self.table.add(cls)
            self.table.count_reached(cls, 0)
            self._age_later(run)
            end = begin
        self.count += len(ids)

    def _forget(self) -> None:
        """Forget the oldest ghost entries beyond the limit, and how often their blocks were
        used."""
        while len(self.ghosts) > self.most_ghosts:
            run = self.ghosts.pop(min(self.ghosts))
            for one in run.blocks:
                del self.run_of[one], self.uses[one], self.parent[one]
                self.children.pop(one, None)
