"""The ledger: which blocks are resident where, the view of each sink, and the difference. Pure
state.

It is a tree. It takes tokens and block hashes from announced paths, so it can name the complete
path when a block is removed. It keeps a block while a tier holds it, a sink's view has it, or such
a block is below it, and for a while after that (see `LedgerTree`).

**The tree rule.** What a sink has been sent is a tree, after every single event in the order sent:
a block is in the sink's view only while the block above it is in the view on some tier, and on
DEVICE only while the block above it is in the view on DEVICE. An index that is a radix tree of the
device, or that finds a block's place by its parent, drops anything else. Two parts keep the rule:

* The tiers due of a block (`SinkView.due`) are the closed truth: the tiers that hold it, as far
  as the rule allows, given the tiers due of the block above. A change spreads to the blocks below.
  A block whose path is interrupted is resident and not due: it cannot be hit.
* A batch takes differences and orders them so that each step between the view and the due state is
  a tree (see `Selection`).

A view may be unsure after a lost answer (`LedgerTree.views`). The rule then holds for what the
sink may have, and for what it has if it took a leading part of the tasks that it was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from kvactors.actor.sliced import Sliced, finish, pace
from kvactors.flush_notifier.blocks import (
    BITS,
    LAST,
    REASON_NUMBERS,
    UNSURE,
    HashInputs,
    LedgerTree,
)
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathCached,
    PathsFound,
    Report,
    TierCleared,
)
from kvactors.flush_notifier.view import ABOVE_ALL, SHIFT, SinkFilter, SinkView
from kvactors.identity import RequestScope, hash_of_block
from kvactors.tables import ShardedDict
from kvactors.types import ALL_TIERS, HASH_BYTES, Reason, Tier, count_hashes, hash_at

IDLE_LIMIT = 16_384  # idle blocks kept by default
CHECK_BLOCKS = 16  # in one step of a check: each costs up to 20 microseconds of cache misses

MAX_WAITING_ORPHANS = 65_536
"""Beyond that the oldest is dropped, and stays unannounced until a request names its path."""

TIERS, DEVICE = int(ALL_TIERS), int(Tier.DEVICE)

Tiers = Mapping[Tier, AbstractSet[bytes]]
"""The blocks that each tier holds."""

RootOf = Callable[[str, RequestScope], bytes]
"""The root hash of the requests of a namespace, an adapter and a salt."""


class Orphans:
    """Resident blocks that are not in the ledger's tree, since no path to them is known.

    An orphan whose hash inputs are known (`PathsFound`) waits until its parent is added to the tree
    on any path. It is dropped if it leaves all tiers before.

    Attributes:
        tiers: the set of tiers that hold each. There are as many as resident blocks at most.
        waiting: orphans whose hash inputs are known, and whose parent is not in the tree.
        attachable: hashes added to the tree since, below which orphans wait.
    """

    def __init__(self) -> None:
        self.tiers: dict[bytes, int] = {}
        self.waiting: dict[bytes, HashInputs] = {}
        self.attachable: deque[bytes] = deque()
        self._below: dict[bytes, dict[bytes, None]] = {}  # hashes of waiting orphans, by parent

    def gain(self, block_hash: bytes, bit: int) -> None:
        self.tiers[block_hash] = self.tiers.get(block_hash, 0) | bit

    def lose(self, block_hash: bytes, bit: int) -> None:
        """A tier no longer holds this block. A block on no tier is dropped."""
        if left := self.tiers.pop(block_hash, 0) & ~bit:
            self.tiers[block_hash] = left
        else:
            self.drop(block_hash)

    def clear(self, bit: int) -> Iterator[None]:
        """A tier holds nothing. With no other change between two blocks."""
        nowhere: list[bytes] = []
        for block_hash, tiers in self.tiers.items():
            if tiers & ~bit:
                self.tiers[block_hash] = tiers & ~bit
            else:
                nowhere.append(block_hash)
            yield
        for block_hash in nowhere:
            self.lose(block_hash, bit)
            yield

    def take_tiers(self, block_hash: bytes) -> int:
        """Remove a block that is added to the tree. Orphans that wait for it become attachable."""
        if self.waiting:
            self.drop(block_hash)
            if block_hash in self._below:
                self.attachable.append(block_hash)
        return self.tiers.pop(block_hash, 0)

    def wait(self, block_hash: bytes, block: HashInputs) -> None:
        """Keep an orphan until its parent is there, and drop the oldest if there are too many."""
        self.drop(block_hash)
        if len(self.waiting) >= MAX_WAITING_ORPHANS:
            self.drop(next(iter(self.waiting)))
        self.waiting[block_hash] = block
        self._below.setdefault(block[0], {})[block_hash] = None

    def drop(self, block_hash: bytes) -> None:
        block = self.waiting.pop(block_hash, None)
        if block is not None:
            below = self._below[block[0]]
            del below[block_hash]
            if not below:
                del self._below[block[0]]

    def next_attachable(self, tree: LedgerTree) -> tuple[bytes, int, HashInputs] | None:
        """Take one orphan whose parent has been added: its hash, its parent, and itself."""
        while self.attachable:
            parent_hash = self.attachable[0]
            parent = tree.find(parent_hash)
            block_hash = next(iter(self._below.get(parent_hash, ())), None)
            if parent and block_hash is not None:
                block = self.waiting[block_hash]
                self.drop(block_hash)
                return block_hash, parent, block
            self.attachable.popleft()
        return None

    def fault(self, block_hash: bytes, tree: LedgerTree) -> str:
        """The inconsistency of an orphan, empty without one."""
        block = self.waiting.get(block_hash)
        if not self.tiers[block_hash]:
            return "an orphan on no tier"
        if tree.find(block_hash):
            return "an orphan in the tree"
        if block and block_hash not in self._below.get(block[0], ()):
            return "an orphan is missing among those of its parent"
        if block and tree.find(block[0]) and block[0] not in self.attachable:
            return "an orphan waits for a parent that is in the tree"
        return ""


class Ledger:
    """Facts in, differences out. A fact yields after every block. No other fact may come before its
    end.

    Args:
    token_root: of the only scope whose blocks go to sinks that address blocks by tokens alone.
    root_of: None if requests begin at every root.
    """

    def __init__(
        self,
        block_size: int,
        filters: Sequence[SinkFilter],
        idle_limit: int = IDLE_LIMIT,
        token_root: bytes = b"",
        root_of: RootOf | None = None,
        namespace: str = "",
    ) -> None:
        self.block_bytes = 4 * block_size
        self.tree = LedgerTree(self.block_bytes, idle_limit)
        self.sinks = [SinkView(self.tree, one) for one in filters]
        self.orphans = Orphans()
        self._root_of = root_of
        self._namespace = namespace
        self._token_root = token_root if any(one.by_tokens for one in filters) else b""
        # the same views with what `update` reads for every block
        self._rules = [
            (view, view.closed, view.conditional, view.dirty, view.due, view.held)
            for view in self.sinks
        ]
        self._announces_full = [view for view in self.sinks if view.filter.announces_full]

    # -- facts

    def apply(self, fact: Report) -> Iterator[None]:
        if isinstance(fact, (BlocksAdded, BlocksRemoved)):
            change = self.gain if isinstance(fact, BlocksAdded) else self.lose
            return change(fact.hashes, fact.tier, fact.reason)
        if isinstance(fact, PathCached):
            return self.announce(fact)
        if isinstance(fact, PathsFound):
            return self.attach_found(fact)
        if isinstance(fact, TierCleared):
            return self.clear(fact.tier, fact.reason)
        return self.change_namespace(fact.namespace)

    def announce(self, message: PathCached) -> Iterator[None]:
        """The first `count` blocks of a path are resident. The message names all of them."""
        tree, total, count = self.tree, count_hashes(message.hashes), message.count
        if len(message.tokens) != self.block_bytes * total:
            raise ValueError(
                f"{len(message.tokens)} bytes of tokens do not match {total} block hashes of "
                f"{self.block_bytes} bytes of tokens each"
            )
        bit, reason = int(message.tier), REASON_NUMBERS[message.reason]
        finished = message.reason is Reason.REQUEST_FINISH
        parent_hash = message.parent
        parent = tree.find(parent_hash) if message.start else 0
        if message.start and not parent:
            # This incarnation has not been sent the path above yet. That will name these blocks.
            yield from self.gain(message.hashes[: count * HASH_BYTES], message.tier, message.reason)
            return
        tree.begin()
        extra_keys = dict(message.extra_keys)
        last_reasons, reasons = tree.reasons[LAST], tree.reasons[bit]
        for i in range(total):
            block_hash = hash_at(message.hashes, i)
            block = tree.find(block_hash)
            if not block:
                tokens = message.tokens[i * self.block_bytes : (i + 1) * self.block_bytes]
                extra_key = extra_keys.get(message.start + i, b"")
                inputs = parent_hash, tokens, extra_key, message.scope
                block = self._learn(block_hash, parent, inputs)
            if i < count:
                tree.tiers[block] |= bit
                if finished:
                    tree.finished[block] = True
                    for view in self._announces_full:
                        view.doubt(block)
                last_reasons[block] = reasons[block] = reason
            if self.update(block) and tree.child[block]:
                yield from self._spread(block)
            parent, parent_hash = block, block_hash
            yield
        yield from self._attach_orphans()
        yield from tree.end()

    def gain(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        return self._change(hashes, int(tier), reason, gained=True)

    def lose(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        return self._change(hashes, int(tier), reason, gained=False)

    def _change(self, hashes: bytes, bit: int, reason: Reason, *, gained: bool) -> Iterator[None]:
        tree, number = self.tree, REASON_NUMBERS[reason]
        of_orphan = self.orphans.gain if gained else self.orphans.lose
        tiers, last_reasons, reasons = tree.tiers, tree.reasons[LAST], tree.reasons[bit]
        tree.begin()
        for i in range(count_hashes(hashes)):
            block_hash = hash_at(hashes, i)
            block = tree.find(block_hash)
            if not block:
                of_orphan(block_hash, bit)
            elif gained or tiers[block] & bit:
                tiers[block] = tiers[block] | bit if gained else tiers[block] & ~bit
                last_reasons[block] = reasons[block] = number
                if self.update(block) and tree.child[block]:
                    yield from self._spread(block)
            yield
        yield from tree.end()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        bit, number = int(tier), REASON_NUMBERS[reason]
        tiers, reasons = self.tree.tiers, self.tree.reasons
        left = 0  # the tiers that still hold something

        def leave(block: int) -> None:
            nonlocal left
            if tiers[block] & bit:
                tiers[block] &= ~bit
                reasons[LAST][block] = reasons[bit][block] = number
            self.update(block)
            left |= tiers[block]

        yield from self.tree.change_all(leave)
        self.tree.begin()
        yield from self.orphans.clear(bit)
        yield from self.tree.end()
        if reason is Reason.CLEAR:
            for view in self.sinks:
                if view.filter.takes_clear and not view.table[left]:
                    view.clear_due = True

    def change_namespace(self, namespace: str) -> Iterator[None]:
        """Announce only the blocks below the roots of a namespace: to a router, a token path under
        two namespaces is one path, and it would answer with blocks that no request can get."""
        self._namespace = namespace
        if self._root_of is None:
            return

        def move(block: int) -> None:
            before = [view.due[block] for view in self.sinks]
            self.update(block)
            if before != [view.due[block] for view in self.sinks]:
                for index in (LAST, *BITS[self.tree.tiers[block]]):
                    self.tree.reasons[index][block] = REASON_NUMBERS[Reason.NAMESPACE]

        yield from self.tree.change_all(move)

    # -- the due state

    def _learn(self, block_hash: bytes, parent: int, inputs: HashInputs) -> int:
        """Add a block that no path has named before. `update` must follow. Without a parent the
        parent hash is a root hash."""
        tree, (parent_hash, tokens, _, _) = self.tree, inputs
        block = tree.add(block_hash, parent, inputs)
        tree.tiers[block] = self.orphans.take_tiers(block_hash)
        if self._token_root and (
            tree.token_addressed[parent] if parent else parent_hash == self._token_root
        ):
            # a block with an extra key has another hash
            tree.token_addressed[block] = block_hash == hash_of_block(parent_hash, tokens)
        return block

    def update(self, block: int) -> bool:
        """A block changed: compute its due state, and compare that with the view of each sink. True
        if the blocks below depend on the change: `_spread` must follow before the next block."""
        tree = self.tree
        above, tiers, spread = tree.parent[block], tree.tiers[block], False
        first = 0 if above else self._above_first(block)
        for view, closed, conditional, dirty, due_of, held in self._rules:
            due = closed[(due_of[above] if above else first) << SHIFT | tiers]
            if due and conditional and not view.filter.accepts(tree, block):
                due = 0
            if due != (before := due_of[block]):
                due_of[block] = due
                spread = spread or not due or not before or bool((due ^ before) & DEVICE)
            if due != held[block]:
                if block not in dirty:
                    view.clock += 1
                    dirty[block] = view.clock
            elif block in dirty:
                del dirty[block]
                view.coalesced += block not in tree.pins
        if not tiers and tree.is_idle(block):
            tree.note_idle(block)
        return spread

    def _above_first(self, first: int) -> int:
        """The tiers due above the first block of a path: all if requests begin at its root now."""
        root_of, tree = self._root_of, self.tree
        if root_of is None or root_of(self._namespace, tree.scope(first)) == tree.parent_hash(
            first
        ):
            return ABOVE_ALL
        return 0

    def _spread(self, top: int) -> Iterator[None]:
        """The tiers due of a block changed: update the blocks below it, down to those for which
        nothing changes."""
        tree, reasons = self.tree, self.tree.reasons
        node = tree.child[top]
        while node:
            below = self.update(node)
            if below:
                for index in (LAST, *BITS[tree.tiers[node]]):
                    reasons[index][node] = reasons[LAST][top]
            yield
            if below and tree.child[node]:
                node = tree.child[node]
                continue
            while node != top and not tree.right[node]:
                node = tree.parent[node]
                yield
            node = 0 if node == top else tree.right[node]

    # -- orphans

    def attach_found(self, message: PathsFound) -> Iterator[None]:
        """Add the resident blocks of these whose parents are in the tree."""
        tree, orphans = self.tree, self.orphans
        tree.begin()
        for part in message.parts:
            extra_keys, parent_hash = dict(part.extra_keys), part.parent
            is_root = parent_hash in message.roots
            size = len(part.tokens) // part.blocks
            for i in range(part.blocks):
                block_hash = hash_at(part.hashes, i)
                if block_hash in orphans.tiers and size == self.block_bytes:
                    tokens = part.tokens[i * size : (i + 1) * size]
                    inputs = parent_hash, tokens, extra_keys.get(i, b""), part.scope
                    parent = tree.find(parent_hash)
                    if parent or (is_root and not i):
                        self._attach(block_hash, parent, inputs)
                    else:
                        orphans.wait(block_hash, inputs)
                parent_hash = block_hash
                yield
        yield from self._attach_orphans()
        yield from tree.end()

    def _attach(self, block_hash: bytes, parent: int, inputs: HashInputs) -> None:
        """Add an orphan to the tree. It has no children yet. It counts as covered by a finished
        request, since one brought it to storage."""
        added, reasons = self._learn(block_hash, parent, inputs), self.tree.reasons
        self.tree.finished[added] = True
        for index in (LAST, int(Tier.STORAGE)):
            reasons[index][added] = REASON_NUMBERS[Reason.STORED]
        self.update(added)

    def _attach_orphans(self) -> Iterator[None]:
        """Add the orphans whose parents have been added, and the orphans below them."""
        while (found := self.orphans.next_attachable(self.tree)) is not None:
            self._attach(*found)
            yield

    # -- checks, between whose steps the ledger may change

    def check(self) -> None:
        finish(self.check_steps())

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the ledger is inconsistent. Each block is checked alone. Counts over
        all blocks are compared if nothing has changed since the beginning."""
        tree, version, still = self.tree, self.tree.version, not self.tree.changing
        over, blocks, idle = pace(CHECK_BLOCKS), 0, 0
        dirty = [0] * len(self.sinks)
        for block in tree.scan():
            self._check_block(block)
            blocks += 1
            idle += block in tree.idle
            for i, view in enumerate(self.sinks):
                dirty[i] += block in view.dirty
            if over():
                yield
        keys = iter(self.orphans.tiers)  # broken once the version has changed
        while still and version == tree.version and (some := list(islice(keys, CHECK_BLOCKS))):
            for block_hash in some:
                fault = self.orphans.fault(block_hash, tree)
                _require(not fault, fault)
            yield
        if still and version == tree.version and not tree.changing:
            waiting, orphans = len(self.orphans.waiting), len(self.orphans.tiers)
            pending = [view.pending for view in self.sinks]
            _require(waiting <= orphans, "a waiting orphan on no tier")
            _require(blocks == len(tree), "a block without a place in the order")
            _require(dirty == pending, "a difference of a block that is not in the tree")
            _require(idle == len(tree.idle), "an idle block that is not in the tree")
            _require(idle <= tree.idle_limit, f"{idle} idle blocks, the limit is {tree.idle_limit}")

    def _check_block(self, block: int) -> None:
        tree, parent = self.tree, self.tree.parent[block]
        _require(tree.find(tree.rows.hash(block)) == block, "a block under another hash")
        if parent:
            _require(tree.depth[parent] > 0, "a block whose parent was removed")
            before, after = tree.left[block], tree.right[block]
            linked = (tree.right[before] if before else tree.child[parent]) == block
            linked = linked and (not after or tree.left[after] == block)
            _require(linked, "a block that is not among the children of its parent")
        _require(
            bool(tree.child[block]) or not tree.is_idle(block) or block in tree.idle,
            "an idle block that is not among the idle ones",
        )
        for sink in self.sinks:
            view, due = sink.held[block], sink.due[block]
            _require(
                (due != view) == (block in sink.dirty)
                or bool(block in tree.pins and tree.changing),
                "a difference that is not pending, or a pending one that is none",
            )
            _require(
                bool(tree.token_addressed[block]) or not (view and sink.filter.by_tokens),
                "a sink addressed by tokens was sent a block that tokens do not identify",
            )
            if tree.changing:
                continue
            above_due = sink.due[parent] if parent else self._above_first(block)
            closed = sink.closed[above_due << SHIFT | tree.tiers[block]]
            expected = closed if sink.filter.accepts(tree, block) else 0
            # A root is another one before the ledger is sent that (`Roots.renew`).
            leaving = not parent and not expected
            _require(
                due == expected or leaving,
                "what is due of a block does not follow from the block above",
            )
            if parent:
                below, above = view | view >> UNSURE, sink.held[parent]
                above |= above >> UNSURE
                _require(
                    bool(above & TIERS or not below & TIERS) and not below & ~above & DEVICE,
                    "a sink's view has a block without the block above it, see Ledger",
                )

    # -- comparison with the tiers

    def divergence_steps(
        self, view: SinkView, mirror: Tiers | None, tiers: Tiers
    ) -> Sliced[set[bytes]]:
        """The blocks on which a sink's view, by the sink's own account if there is a mirror, and
        the closed truth of the tiers differ. A change between two slices may or may not count."""
        differing: set[bytes] = set()
        over, found, expected = pace(CHECK_BLOCKS), 0, ShardedDict[int]()
        for block_hash, block, due in self.announceable(view.filter, tiers, expected):
            held = view.held[block] & TIERS if mirror is None else tiers_of(mirror, block_hash)
            found += held.bit_count()
            if due != held:
                differing.add(block_hash)
            if over():  # afterwards another block may have the row
                yield
        if mirror is not None and found != sum(map(len, mirror.values())):
            for block_hash in chain.from_iterable(map(list, mirror.values())):
                if over():
                    yield
                if not self.tree.find(block_hash):
                    differing.add(block_hash)
        yield from expected.free()
        return differing

    def announceable(
        self, sink: SinkFilter, tiers: Tiers, expected: ShardedDict[int]
    ) -> Iterator[tuple[bytes, int, int]]:
        """The hash of every block whose path is known, parents before children, the block, and the
        tiers on which it would be announced to a sink with this filter if `tiers` held these
        blocks. expected: filled with the announced tiers by block hash, for the caller to free in
        slices."""
        tree, closed = self.tree, sink.closed()
        for block in tree.scan():
            block_hash = tree.rows.hash(block)
            if tree.parent[block]:
                parent_hash = tree.parent_hash(block)
                above = expected.of(parent_hash).get(parent_hash, 0)
            else:
                above = self._above_first(block)
            due = closed[above << SHIFT | tiers_of(tiers, block_hash)]
            if due and not sink.accepts(tree, block):
                due = 0
            if due:
                expected.of(block_hash)[block_hash] = due
            yield block_hash, block, due


def tiers_of(tiers: Tiers, block_hash: bytes) -> int:
    """The set of tiers that hold a block."""
    return sum(tier for tier, hashes in tiers.items() if block_hash in hashes)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
