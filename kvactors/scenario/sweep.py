"""Hit rates of least-recently-used tiers of every size from one pass over a trace.

The method is Mattson's (Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage
hierarchies, IBM Systems Journal 9(2), 1970): an LRU cache of C blocks hits an access if fewer than
C other blocks were accessed since the block's last access (its stack distance is at most C). It
holds for prefix caches too, because a request accesses a whole path: of a path, the blocks near the
root are always the more recent ones, so the leaf-first victim is the least recent block.

A request larger than the device is refused and accesses nothing. Sizes below the longest request
therefore take a separate pass each."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.native import BlockTree, LifeTables, Path
from kvactors.prefix_index.settings import OBSERVED_REQUESTS
from kvactors.scenario.output import in_unicode, print_fields, print_rows
from kvactors.scenario.report import in_line
from kvactors.scenario.trace import TraceRequest, read_trace
from kvactors.settings import Config
from kvactors.settings.check import human

Blocks = NDArray[np.int64]
"""Numbers of blocks [n], dense from 0."""

ACCESSES = 1 << 28
"""Accesses of one trace at most: 2 GiB of numbers."""


class Paths(NamedTuple):
    """The requests of a trace, each a path of blocks from the root. blocks: the blocks of all
    requests, one request after another, int64 [accesses]. ends: the end of each request in
    `blocks`, int64 [requests]. whole: whether a request may hit all its blocks
    (`cache.recompute_last_token` is off). If not, a real device of exactly one size may hit less: a
    prompt that is cached whole takes one block more for its last token."""

    blocks: Blocks
    ends: Blocks
    distinct: int
    whole: bool = True

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends, prepend=0).max(initial=0))


def read_paths(requests: Iterable[NDArray[np.uint64]], *, whole: bool = True) -> Paths:
    """Number the blocks of a trace. requests: the block ids of each request, in the order of
    arrival. Equal ids are the same block after the same prefix."""
    ids = list(requests)
    ends = np.cumsum([len(one) for one in ids], dtype=np.int64)
    if len(ends) and ends[-1] > ACCESSES:
        raise ConfigError(f"the trace has {ends[-1]} accesses, more than {ACCESSES}: set a limit")
    together = np.concatenate(ids) if ids else np.empty(0, np.uint64)
    names, blocks = np.unique(together, return_inverse=True)
    paths = Paths(blocks.astype(np.int64), ends, len(names), whole)
    _check_chained(paths, names)
    return paths


def _check_chained(paths: Paths, names: NDArray[np.uint64]) -> None:
    """Raise ConfigError unless every block has one parent."""
    parents = np.empty_like(paths.blocks)
    parents[1:] = paths.blocks[:-1]
    starts = np.concatenate(([0], paths.ends[:-1])) if len(paths.ends) else paths.ends
    parents[starts[starts < len(parents)]] = -1
    first = np.empty(paths.distinct, np.int64)
    first[paths.blocks[::-1]] = parents[::-1]  # of a block's accesses the first one is kept
    wrong = np.flatnonzero(first[paths.blocks] != parents)
    if len(wrong):
        request = int(np.searchsorted(paths.ends, wrong[0], side="right"))
        raise ConfigError(
            f"request {request}: block {names[paths.blocks[wrong[0]]]} follows another block than "
            "before. Ids must be chained: one id is one block after one prefix"
        )


class Known(NamedTuple):
    """A run of blocks of a path that an earlier request used last. distance: stack distance of the
    first. It rises by 1 a block."""

    low: int
    high: int
    before: int
    distance: int


class RecencyStack:
    """Blocks in the order of their last access.

    Blocks of one request are in the order of its path, so the stack is kept as segments: the
    request that accessed a block last, and of each request the depth of the first block that no
    later request accessed. Blocks that only this request accessed last are the deepest ones of its
    path. A Fenwick tree holds the number of blocks of each segment.
    """

    def __init__(self, paths: Paths) -> None:
        self._last = np.full(paths.distinct, -1, np.int64)
        self._first_left = [0] * len(paths.ends)
        self._tree = [0] * (len(paths.ends) + 1)
        self._total = 0

    def access(self, request: int, path: Blocks) -> list[Known]:
        """Bring a path to the top. Returns its runs of known blocks, from the root on."""
        seen = self._last[path]
        known = int(np.count_nonzero(seen >= 0))  # a prefix, since ids are chained
        bounds = [0, *(np.flatnonzero(np.diff(seen[:known])) + 1).tolist(), known]
        runs: list[Known] = []
        for low, high in pairwise(bounds if known else []):
            segment = int(seen[low])
            above = self._total - self._up_to(segment) + low - self._first_left[segment]
            runs.append(Known(low, high, segment, above + 1))
        for run in runs:
            self._add(run.before, run.low - run.high)
            self._first_left[run.before] = run.high
        self._add(request, len(path))
        self._total += len(path) - known
        self._last[path] = request
        return runs

    def _add(self, request: int, blocks: int) -> None:
        at = request + 1
        while at < len(self._tree):
            self._tree[at] += blocks
            at += at & -at

    def _up_to(self, request: int) -> int:
        """Blocks in the segments of this request and of earlier ones."""
        at, found = request + 1, 0
        while at:
            found += self._tree[at]
            at &= at - 1
        return found


class Uses(NamedTuple):
    """Uses of blocks after an earlier use, for one size of the device, in runs of blocks of a path:
    int64 [runs] each. hits: blocks hit by an LRU cache of that many blocks, int64 [distinct + 1],
    rising. looked_up: blocks of all requests, those of refused ones included."""

    request: Blocks
    before: Blocks
    distance: Blocks
    blocks: Blocks
    hits: Blocks
    looked_up: int
    refused: int

    def rate(self, size: int) -> float:
        """Share of the looked-up blocks that an LRU cache of `size` blocks hits."""
        return int(self.hits[min(size, len(self.hits) - 1)]) / max(1, self.looked_up)

    def size_for(self, share: float) -> int:
        """The smallest LRU cache that has a share of the hits of an unlimited one, in blocks."""
        return int(np.searchsorted(self.hits, share * int(self.hits[-1])))


def uses_of(paths: Paths, device: int | None = None) -> Uses:
    """The uses of blocks that a cache may hit. Requests larger than the device are refused."""
    stack, begin, refused = RecencyStack(paths), 0, 0
    found: list[tuple[int, int, int, int]] = []
    for request, end in enumerate(paths.ends.tolist()):
        path, begin = paths.blocks[begin:end], end
        if device is not None and len(path) > device:
            refused += 1
            continue
        most = len(path) if paths.whole else len(path) - 1
        found += [
            (request, run.before, run.distance, min(run.high, most) - run.low)
            for run in stack.access(request, path)
            if run.low < most
        ]
    columns = np.array(found, np.int64).reshape(-1, 4).T
    distance, blocks = columns[2:]
    changes = np.zeros(paths.distinct + 2, np.int64)  # of the number of hits, by stack distance
    np.add.at(changes, distance, 1)
    np.subtract.at(changes, distance + blocks, 1)
    hits = np.cumsum(np.cumsum(changes[:-1]))
    return Uses(columns[0], columns[1], distance, blocks, hits, len(paths.blocks), refused)


def sizes_to_show(distinct: int, points: int = 40) -> list[int]:
    """Sizes from 1 block to the whole trace, rising by a constant factor."""
    return sorted({round(size) for size in np.geomspace(1, distinct, points)})


# -- the offline optimum
#
# Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
# 5(2), 1966): the victim is the block whose next use is farthest. A block of a finished request may
# be the victim itself. A use of a block uses those before it too, so the farthest next use is
# always at a leaf, and no cache that keeps whole prefixes hits more than this one. Blocks that were
# used last by the same request and are used next by the same request are interchangeable. They form
# an interval between two requests, and intervals are counted in place of blocks.


def optimal_hits(uses: Uses, requests: int, size: int) -> int:
    """Blocks that a cache hits at most."""
    begun: list[list[tuple[int, int]]] = [[] for _ in range(requests)]
    columns = (uses.before.tolist(), uses.request.tolist(), uses.blocks.tolist())
    for before, request, blocks in zip(*columns, strict=True):
        begun[before].append((request, blocks))
    kept: dict[int, int] = {}  # blocks in the cache, by the request that uses them next
    farthest: list[int] = []  # heap of those requests, negated
    hits = held = 0
    for number, intervals in enumerate(begun):
        hit = kept.pop(number, 0)
        hits += hit
        held -= hit
        for request, blocks in intervals:
            if request not in kept:
                kept[request] = 0
                heappush(farthest, -request)
            kept[request] += blocks
            held += blocks
        while held > size:
            request = -farthest[0]
            dropped = min(kept[request], held - size)
            kept[request] -= dropped
            held -= dropped
            if not kept[request]:
                del kept[request]
                heappop(farthest)
    return hits


# -- one device tier under an eviction policy: the native tree without actors and bytes


ROOT = bytes(32)

REPORTED = 256
"""Requests between two calls of `progress`."""

RequestsDone = Callable[[int], None]


class DeviceTier:
    """A device of one size whose requests run one after another."""

    def __init__(self, size: int, tables: LifeTables | None = None) -> None:
        self.tree = BlockTree(1, 0, False, tables)
        self.size = size
        self.refused = 0
        self._free = list(range(size))

    def request(
        self,
        ids: NDArray[np.uint32],
        now: float,
        output: int = -1,
        *,
        ends: bool = False,
        returns_in: float = -1.0,
    ) -> int:
        """Serve one request from its beginning to its end. output: tokens that the model produced,
        -1 if that is not known. returns_in: a hint in seconds, -1 without. Returns the blocks that
        it hits. A request larger than the device is refused: it hits none and changes nothing."""
        if len(ids) > self.size:
            self.refused += 1
            return 0
        tree, path = self.tree, Path(1, ROOT)
        path.extend(ids)
        tree.advance(now)
        hits, _ = tree.pin(path)
        missing = len(ids) - hits
        if missing > len(self._free):
            self.evict(missing - len(self._free))
        if missing:
            path.assign(hits, self._free[-missing:])
            del self._free[-missing:]
        tree.commit(path, len(ids))
        tree.touch(path, output, ends, returns_in)
        tree.release(path)
        return hits

    def evict(self, count: int) -> list[int]:
        """Free some blocks, and return them in the order in which the policy chose them."""
        nodes, _, _, blocks, *_ = self.tree.evict(count)
        freed, _ = self.tree.finish_offload(nodes, bytes(len(nodes)))
        self._free += freed
        return blocks


def retain_hits(
    paths: Paths,
    requests: Sequence[TraceRequest],
    size: int,
    progress: RequestsDone = lambda _: None,
) -> int:
    """The blocks that a device of `size` blocks hits under RETAIN. paths: the blocks of the
    requests. progress: called with the number of requests that are done, from time to time."""
    device = DeviceTier(size, LifeTables(first=OBSERVED_REQUESTS))
    blocks = paths.blocks.astype(np.uint32)
    hits = begin = 0
    for number, (request, end) in enumerate(zip(requests, paths.ends.tolist(), strict=True), 1):
        ids, begin = blocks[begin:end], end
        most = len(ids) if paths.whole else len(ids) - 1
        hits += min(most, device.request(ids, request.timestamp, request.output_length))
        if number % REPORTED == 0:
            progress(number)
    return hits


# -- LRU tiers of a config's sizes


def rates_of(paths: Paths, config: Config) -> dict[str, float]:
    """Share of the looked-up blocks that each of a config's tiers hits under LRU, and the number of
    refused requests. Exclusive tiers hit together like one cache of all their blocks, inclusive
    ones like one cache of the blocks of the largest. A store without a limit holds every block."""
    device, host, store, stored = config.device.num_blocks, config.host.slots, config.storage, 0
    if store.backend != "none" and not config.flush.flush_only:
        stored = paths.distinct if store.capacity_blocks is None else store.capacity_blocks
    together = sum if config.host.mode == "exclusive" else max
    uses = uses_of(paths, device)
    at_device, at_host, total = (
        uses.rate(together(sizes)) for sizes in ([device], [device, host], [device, host, stored])
    )
    shares = {"device": at_device, "host": at_host - at_device, "storage": total - at_host}
    rounded = {tier: round(share, 6) for tier, share in (shares | {"total": total}).items()}
    return rounded | {"refused": uses.refused}


def lru_rates(requests: Iterable[TraceRequest], config: Config) -> dict[str, float]:
    """The hit rates that LRU tiers of the same sizes have, if the requests come one after another.

    Empty if every tier of the config is LRU, or if they cannot be had in advance: the store's size
    is given in bytes, or the ids are not chained.
    """
    policies = (config.device.policy, config.host.policy)
    if "retain" not in policies or config.storage.capacity_bytes is not None:
        return {}
    try:
        whole = not config.cache.recompute_last_token
        rates = rates_of(read_paths((one.ids for one in requests), whole=whole), config)
    except ConfigError:
        return {}
    del rates["refused"]
    return rates


# -- the report of `kvactors sweep`: hit rate against cache size


SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Shares of the most hits possible, for which the smallest cache is reported."""

ROWS = 12
"""Sizes in the table on the terminal, unless sizes are given."""


class SweepPoint(msgspec.Struct):
    """A device of one size, without other tiers."""

    blocks: int
    bytes: int | None
    hit_rate: float
    refused: int
    optimum: float
    retain: float | None = None


class SweepReport(msgspec.Struct):
    """Hit rates of tiers on a trace. size_for: the blocks that have a share of the most hits, by
    share."""

    trace: str
    requests: int
    blocks_looked_up: int
    distinct_blocks: int
    longest_request: int
    block_bytes: int | None
    most: float
    points: list[SweepPoint]
    size_for: dict[str, int]
    tiers: dict[str, float] = msgspec.field(default_factory=dict)


def sweep(
    trace: str | pathlib.Path,
    *,
    sizes: Sequence[int] = (),
    coarse: int = 1,
    limit: int = 0,
    block_bytes: int | None = None,
    config: Config | None = None,
    retain: bool = True,
    progress: Callable[[str, float], object] = lambda _text, _share: None,
) -> SweepReport:
    """Hit rates of a trace by cache size. sizes: of the device, in blocks. Empty: from one block to
    the whole trace. limit: see `read_trace`. A config's if there is one and this is 0."""
    if config is not None and config.cache.groups:
        raise ConfigError(
            "a sweep is about blocks of one kind, and the config has cache.groups: leave --config "
            "out for the hits of the layers with full attention, which no group can exceed, and "
            "take the sizes of the groups from `kvactors size`"
        )
    if any(size < 1 for size in sizes):
        raise ConfigError(f"a device has at least one block, not {min(sizes)}")
    requests = list(read_trace(trace, coarse=coarse, limit=limit))
    whole = config is None or not config.cache.recompute_last_token
    paths = read_paths((one.ids for one in requests), whole=whole)
    every, chosen = uses_of(paths), sorted(set(sizes)) or sizes_to_show(paths.distinct)
    points: list[SweepPoint] = []
    for size in chosen:
        uses = uses_of(paths, size) if size < paths.longest else every
        retained = None
        if retain:  # it is no stack algorithm: each size is a run

            def done(count: int, size: int = size) -> None:
                share = (len(points) + count / len(requests)) / len(chosen)
                progress(f"RETAIN, {size:,} blocks", share)

            done(0)
            hits = retain_hits(paths, requests, size, done)
            retained = round(hits / max(1, len(paths.blocks)), 6)
        optimum = optimal_hits(uses, len(requests), size) / max(1, uses.looked_up)
        points.append(
            SweepPoint(
                size,
                block_bytes and size * block_bytes,
                round(uses.rate(size), 6),
                uses.refused,
                round(optimum, 6),
                retained,
            )
        )
    return SweepReport(
        in_unicode(pathlib.Path(trace).name),
        len(requests),
        every.looked_up,
        paths.distinct,
        paths.longest,
        block_bytes,
        round(every.rate(paths.distinct), 6),
        points,
        {f"{share:g}": every.size_for(share) for share in SHARES},
        {} if config is None else rates_of(paths, config),
    )


COLUMNS = ("blocks", "bytes", "LRU", "RETAIN", "optimum", "LRU of the most", "too large")


def print_sweep(report: SweepReport, console: Console, most: int = ROWS) -> None:
    """Print the summary and a table of sizes, of `most` rows and two more at most."""
    every = max(1, -(-len(report.points) // most)) if len(report.points) > most + 2 else 1
    shown = report.points[::-1][::every][::-1]
    fields = [
        ("requests", f"{report.requests:,}, the largest {report.longest_request:,} blocks"),
        ("blocks looked up", f"{report.blocks_looked_up:,}"),
        ("distinct blocks", f"{report.distinct_blocks:,}"),
        ("most hits possible", f"{report.most:.4f}"),
    ]
    for share, size in report.size_for.items():
        text = human(size * report.block_bytes) if report.block_bytes else ""
        fields.append((f"{float(share):.0%} of them", f"{size:,} blocks  {text}"))
    if report.tiers:
        fields.append(("tiers under LRU", in_line(report.tiers, "g")))
    print_fields(report.trace, fields, console)
    table = [
        (
            f"{point.blocks:,}",
            "" if point.bytes is None else human(point.bytes),
            f"{point.hit_rate:.4f}",
            "" if point.retain is None else f"{point.retain:.4f}",
            f"{point.optimum:.4f}",
            f"{point.hit_rate / report.most if report.most else 0.0:.1%}",
            f"{point.refused or ''}",
        )
        for point in shown
    ]
    print_rows("hit rate of one tier", COLUMNS, table, console, numbers=range(len(COLUMNS)))
