"""Match and insert: 64 prompts of 8,192 tokens in groups of 8 that share 75 %, given as 64-bit
integers, beside SGLang's Rust tree in a process of its Python.

The two take turns with the same prompts. Processor time is counted: neither waits for anything, and
what runs beside them does not count.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

from kvactors.native import BlockTree, Path
from tests.benchmarks.frame import Peer, Report, Row, rate_row, time_row
from tests.benchmarks.index_child import (
    GROUP_SIZE,
    LENGTH,
    SHARED,
    Prompts,
    batch_of,
    resident_bytes,
    some_stored,
    stored_prompt,
)

PROMPTS = 64
ROOT = bytes(32)
BLOCKS = 1_000_000
"""Blocks that the index has before, in the rows of a filled index."""
LOOK_UPS = 5
"""Turns of a row of look-ups for each of another row. One takes about a millisecond, so that a
neighbour on the same processor slows some of them as a whole."""
LONG = 131_072
"""Tokens of a long prompt."""
PEER = "SGLang's Rust tree"
HASHED = "SGLang's Rust tree with KV events"
PUBLISHED = "SGLang's Rust tree on the same workload, no hashes (published)"
PUBLISHED_RATE = 233.0
UNIT = "M tokens/s"


class Turn(NamedTuple):
    """Processor seconds of a turn, and the tokens that were there before."""

    seconds: float
    hits: int


def insert(tree: BlockTree, batch: Prompts, block_size: int, *, hashes: bool = False) -> int:
    """Match each prompt, give the missing blocks ids, make them shareable, let go. hashes: ask for
    the hashes of the new blocks, as a sink does. Returns the tokens that were there before."""
    hits = 0
    for tokens in batch:
        path = Path(block_size, ROOT)
        path.extend(tokens)
        run, _ = tree.pin(path)
        blocks = path.num_full_blocks
        path.assign(run, range(blocks - run))
        tree.commit(path, blocks)
        if hashes:
            path.hashes(run, blocks)
        tree.release(path)
        hits += run * block_size
    return hits


class OurTree:
    """The index, as the peer's process has SGLang's."""

    def __init__(self) -> None:
        self._block_size = self._stored = 0
        self._hashes = False
        self._tree: BlockTree | None = None

    def new(self, block_size: int, *, hashes: bool, blocks: int) -> None:
        """Begin with an empty tree that has memory for `blocks`."""
        self._tree = None
        self._block_size, self._hashes, self._stored = block_size, hashes, 0
        self._tree = BlockTree(block_size, blocks, eager_hashes=hashes)

    def drop(self) -> None:
        """Free the tree."""
        self._tree = None

    def fill(self, prompts: int) -> None:
        """Store prompts that have nothing in common."""
        for number in range(self._stored, self._stored + prompts):
            insert(self._current(), [stored_prompt(number)], self._block_size)
        self._stored += prompts

    def insert(self, seed: int, count: int, length: int) -> Turn:
        """Match and insert the prompts of a round."""
        batch = batch_of(seed, count, length)
        began = time.process_time()
        hits = insert(self._current(), batch, self._block_size, hashes=self._hashes)
        return Turn(time.process_time() - began, hits)

    def look_up(self, seed: int, count: int) -> Turn:
        """Match prompts that are stored, and hold them for a moment."""
        tree, hits = self._current(), 0
        batch = some_stored(seed, count, self._stored)
        began = time.process_time()
        for tokens in batch:
            path = Path(self._block_size, ROOT)
            path.extend(tokens)
            hits += tree.pin(path)[0] * self._block_size
            tree.release(path)
        return Turn(time.process_time() - began, hits)

    def visit(self) -> None:
        """Match every stored prompt once."""
        for number in range(self._stored):
            path = Path(self._block_size, ROOT)
            path.extend(stored_prompt(number))
            self._current().peek(path)

    def _current(self) -> BlockTree:
        if self._tree is None:
            raise RuntimeError("no tree has been made")
        return self._tree


class Bench:
    """Both trees, in the same state.

    Args:
        peer: the process that has SGLang's tree. None without SGLang.
        rounds: turns of each in a row of the report.
    """

    def __init__(self, peer: Peer | None, rounds: int) -> None:
        self.rows: list[Row] = []
        self._peer = peer
        self._rounds = rounds
        self._ours = OurTree()

    def empty(
        self, case: str, block_size: int, count: int, length: int, *, hashes: bool = False
    ) -> float:
        """A row of rounds that begin with an empty index. Returns our rate."""

        def new() -> None:
            blocks = count * length // block_size
            self._new(block_size, blocks + 1024, hashes=hashes)

        return self._measure(case, "insert", (count, length), new, hashes=hashes)

    def filled(self, block_size: int, count: int, blocks: int) -> None:
        """The rows of an index that has `blocks`."""
        per_prompt = LENGTH // block_size
        stored = -(-blocks // per_prompt)
        self._ours.drop()
        before = resident_bytes()
        self._new(block_size, stored * per_prompt + 1, hashes=False)  # full, with its root
        self._ours.fill(stored)
        # A small index may fit in memory that the process has.
        ours = max(resident_bytes() - before, 1) / (stored * per_prompt)
        if self._peer is not None:
            found = self._peer.ask("fill", prompts=stored)["bytes"] / (stored * per_prompt)
            name = f"block {block_size}, memory a block of {block_size}, {blocks:,} blocks"
            self.rows.append(time_row(name, ours, found, "bytes", PEER))
        case = f"block {block_size}, {blocks:,} blocks before"
        # A hypervisor may give memory that was idle for a while only at the next access.
        self._ours.visit()
        if self._peer is not None:
            self._peer.ask("visit")
        self._measure(f"{case}, look-up", "look_up", (count,), rounds=LOOK_UPS * self._rounds)
        added = count * per_prompt * (self._rounds + 1)
        self._ours.new(block_size, hashes=False, blocks=stored * per_prompt + added)
        self._ours.fill(stored)
        self._measure(case, "insert", (count, LENGTH))
        self._new(block_size, 1024, hashes=False)

    def _new(self, block_size: int, blocks: int, *, hashes: bool) -> None:
        self._ours.new(block_size, hashes=hashes, blocks=blocks)
        if self._peer is not None:
            self._peer.ask("new", block_size=block_size, hashes=hashes)

    def _measure(
        self,
        case: str,
        do: str,
        sizes: tuple[int, ...],
        before: Any = None,
        *,
        hashes: bool = False,
        rounds: int = 0,
    ) -> float:
        """Take turns, and add the row. rounds: 0 for the usual number."""
        names = ("count", "length")[: len(sizes)]
        tokens = sizes[0] * (sizes[1] if len(sizes) > 1 else LENGTH)
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(rounds or self._rounds):
            if before is not None:
                before()
            turns = {}
            for who in ("ours", "peer") if number % 2 else ("peer", "ours"):
                if who == "ours":
                    turns[who] = getattr(self._ours, do)(number, *sizes)
                elif self._peer is not None:
                    found = self._peer.ask(do, seed=number, **dict(zip(names, sizes, strict=True)))
                    turns[who] = Turn(**found)
            if len({turn.hits for turn in turns.values()}) > 1:
                raise RuntimeError(f"{case}: not the same tokens were found: {turns}")
            ours.append(tokens / turns["ours"].seconds / 1e6)
            if "peer" in turns:
                theirs.append(tokens / turns["peer"].seconds / 1e6)
        rate = median(ours)
        if theirs:
            limit = HASHED if hashes else PEER
            self.rows.append(rate_row(case, rate, median(theirs), UNIT, limit))
        elif not hashes:
            self.rows.append(rate_row(case, rate, PUBLISHED_RATE, UNIT, PUBLISHED))
        return rate


def run(*, quick: bool = False, sglang_python: str = "") -> Report:
    """All rows. sglang_python: a Python that has SGLang. Without one its published rate is the
    limit."""
    rounds, filled, long = (1, 1024, 16_384) if quick else (9, BLOCKS, LONG)
    with ExitStack() as stack:
        peer = None
        if sglang_python:
            peer = Peer(sglang_python, "index_child.py", variables={})
            stack.callback(peer.close)
        bench = Bench(peer, rounds)
        for size in (64, 16):
            plain = bench.empty(f"block {size}, empty index", size, PROMPTS, LENGTH)
            case = f"block {size}, empty index, new blocks hashed"
            bench.empty(case, size, PROMPTS, LENGTH, hashes=True)
            bench.filled(size, PROMPTS, filled)
            longer = bench.empty(f"block {size}, {long:,}-token prompts", size, GROUP_SIZE, long)
            case = f"block {size}, {long:,}-token prompts beside shorter ones"
            limit = f"{LENGTH:,}-token prompts"
            bench.rows.append(rate_row(case, longer, plain, UNIT, limit))
    settings = {
        "prompts": PROMPTS,
        "tokens": LENGTH,
        "group_size": GROUP_SIZE,
        "shared": SHARED,
        "rounds": rounds,
        "quick": quick,
    }
    return Report(bench.rows, settings)
