"""The ledger: which blocks are resident where, the view of each sink, and the difference. Pure
state.

It is a tree. It takes tokens and block hashes from announced paths, so it can name the complete
path when a block is removed. It keeps a block while a tier holds it, a sink's view has it, or such
a block is below it, and for a while after that (see `LedgerTree`).

**The tree rule.** What a sink has been sent is a tree, after every single event in the order sent:
a block is in the sink's view only while the block above it is in the view on some tier, and on
DEVICE only while the block above it is in the view on DEVICE. An index that is a radix tree of the
device, or that finds a block's place by its parent, drops anything else. Two parts keep the rule:

* The tiers due of a block (`LedgerBlock.due`) are the closed truth: the tiers that hold it, as far
  as the rule allows, given the tiers due of the block above. A change spreads to the blocks below.
  A block whose path is interrupted is resident and not due: it cannot be hit.
* A batch takes differences and orders them so that each step between the view and the due state is
  a tree (see `Selection`).

A view may be unsure after a lost answer (`LedgerBlock.views`). The rule then holds for what the
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
    LedgerBlock,
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
STEP_BLOCKS = 256  # blocks processed in one slice by default

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

    def clear(self, bit: int, step: int) -> Iterator[None]:
        """A tier holds nothing. Slices of `step` blocks, with no other change between them."""
        nowhere: list[bytes] = []
        for i, (block_hash, tiers) in enumerate(self.tiers.items(), 1):
            if tiers & ~bit:
                self.tiers[block_hash] = tiers & ~bit
            else:
                nowhere.append(block_hash)
            if not i % step:
                yield
        for i, block_hash in enumerate(nowhere, 1):
            del self.tiers[block_hash]
            self.drop(block_hash)
            if not i % step:
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

    def next_attachable(self, tree: LedgerTree) -> tuple[bytes, LedgerBlock, HashInputs] | None:
        """Take one orphan whose parent has been added: its hash, its parent, and itself."""
        while self.attachable:
            parent_hash = self.attachable[0]
            parent = tree.blocks.get(parent_hash)
            block_hash = next(iter(self._below.get(parent_hash, ())), None)
            if parent is not None and block_hash is not None:
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
        if block_hash in tree.blocks:
            return "an orphan in the tree"
        if block and block_hash not in self._below.get(block[0], ()):
            return "an orphan is missing among those of its parent"
        if block and block[0] in tree.blocks and block[0] not in self.attachable:
            return "an orphan waits for a parent that is in the tree"
        return ""


class Ledger:
    """Facts in, differences out. Facts run in slices. No other fact may come between the slices.

    Args:
    token_root: of the only scope whose blocks go to sinks that address blocks by tokens alone.
    root_of: None if requests begin at every root.
    """

    def __init__(
        self,
        block_size: int,
        filters: Sequence[SinkFilter],
        idle_limit: int = IDLE_LIMIT,
        step: int = STEP_BLOCKS,
        token_root: bytes = b"",
        root_of: RootOf | None = None,
        namespace: str = "",
    ) -> None:
        self.block_bytes = 4 * block_size
        self.tree = LedgerTree(idle_limit, step)
        self.sinks = [SinkView(self.tree, i, one) for i, one in enumerate(filters)]
        self.orphans = Orphans()
        self._root_of = root_of
        self._namespace = namespace
        self._token_root = token_root if any(one.by_tokens for one in filters) else b""
        # the same views with what `update` reads for every block
        self._rules = [(view, view.closed, view.conditional, view.dirty) for view in self.sinks]
        self._announces_full = [view for view in self.sinks if view.filter.announces_full]

    @property
    def blocks(self) -> dict[bytes, LedgerBlock]:
        return self.tree.blocks

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
        parent = tree.blocks.get(parent_hash) if message.start else None
        if message.start and parent is None:
            # This incarnation has not been sent the path above yet. That will name these blocks.
            yield from self.gain(message.hashes[: count * HASH_BYTES], message.tier, message.reason)
            return
        tree.begin()
        looked, extra_keys = 0, dict(message.extra_keys)
        for i in range(total):
            block_hash = hash_at(message.hashes, i)
            block = tree.blocks.get(block_hash)
            if block is None:
                tokens = message.tokens[i * self.block_bytes : (i + 1) * self.block_bytes]
                extra_key = extra_keys.get(message.start + i, b"")
                inputs = parent_hash, tokens, extra_key, message.scope
                block = self._learn(block_hash, parent, inputs)
            if i < count:
                block.tiers |= bit
                if finished:
                    block.finished = True
                    for view in self._announces_full:
                        view.doubt(block)
                block.reasons[LAST] = block.reasons[bit] = reason
            if self.update(block) and block.child is not None:
                looked = yield from self._spread(block, looked)
            parent, parent_hash = block, block_hash
            looked += 1
            if looked >= tree.step:
                looked = 0
                block.pins += 1  # its child is still to come
                yield from tree.pause()
                tree.unpin(block)
        yield from self._attach_orphans()
        yield from tree.end()

    def gain(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        return self._change(hashes, int(tier), reason, gained=True)

    def lose(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        return self._change(hashes, int(tier), reason, gained=False)

    def _change(self, hashes: bytes, bit: int, reason: Reason, *, gained: bool) -> Iterator[None]:
        tree, looked, number = self.tree, 0, REASON_NUMBERS[reason]
        of_orphan = self.orphans.gain if gained else self.orphans.lose
        tree.begin()
        for i in range(count_hashes(hashes)):
            if looked >= tree.step:
                looked = 0
                yield from tree.pause()
            looked += 1
            block_hash = hash_at(hashes, i)
            block = tree.blocks.get(block_hash)
            if block is None:
                of_orphan(block_hash, bit)
            elif gained or block.tiers & bit:
                block.tiers = block.tiers | bit if gained else block.tiers & ~bit
                block.reasons[LAST] = block.reasons[bit] = number
                if self.update(block) and block.child is not None:
                    looked = yield from self._spread(block, looked)
        yield from tree.end()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        bit, number = int(tier), REASON_NUMBERS[reason]
        left = 0  # the tiers that still hold something

        def leave(block: LedgerBlock) -> None:
            nonlocal left
            if block.tiers & bit:
                block.tiers &= ~bit
                block.reasons[LAST] = block.reasons[bit] = number
            self.update(block)
            left |= block.tiers

        yield from self.tree.change_all(leave)
        for _ in self.orphans.clear(bit, self.tree.step):
            yield
            self.tree.version += 1
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

        def move(block: LedgerBlock) -> None:
            before = block.due[:]
            self.update(block)
            if block.due != before:
                for index in (LAST, *BITS[block.tiers]):
                    block.reasons[index] = REASON_NUMBERS[Reason.NAMESPACE]

        yield from self.tree.change_all(move)

    # -- the due state

    def _learn(
        self, block_hash: bytes, parent: LedgerBlock | None, inputs: HashInputs
    ) -> LedgerBlock:
        """Add a block that no path has named before. `update` must follow. Without a parent the
        parent hash is a root hash."""
        block = LedgerBlock(block_hash, parent, inputs, len(self.sinks))
        block.tiers = self.orphans.take_tiers(block_hash)
        self.tree.add(block)
        if self._token_root and (
            parent.token_addressed if parent is not None else block.parent_hash == self._token_root
        ):
            # a block with an extra key has another hash
            block.token_addressed = block_hash == hash_of_block(block.parent_hash, block.tokens)
        return block

    def update(self, block: LedgerBlock) -> bool:
        """A block changed: compute its due state, and compare that with the view of each sink. True
        if the blocks below depend on the change: `_spread` must follow before the next block."""
        above, tiers, spread = block.parent, block.tiers, False
        due_before, views = block.due, block.views
        first = self._above_first(block) if above is None else 0
        for sink, (view, closed, conditional, dirty) in enumerate(self._rules):
            due = closed[(first if above is None else above.due[sink]) << SHIFT | tiers]
            if due and conditional and not view.filter.accepts(block):
                due = 0
            if due != (before := due_before[sink]):
                due_before[sink] = due
                spread = spread or not due or not before or bool((due ^ before) & DEVICE)
            if due != views[sink]:
                if block not in dirty:
                    view.clock += 1
                    dirty[block] = view.clock
            elif block in dirty:
                del dirty[block]
                view.coalesced += not block.pins
        if not tiers and block.idle():
            self.tree.note_idle(block)
        return spread

    def _above_first(self, first: LedgerBlock) -> int:
        """The tiers due above the first block of a path: all if requests begin at its root now."""
        root_of = self._root_of
        if root_of is None or root_of(self._namespace, first.scope) == first.parent_hash:
            return ABOVE_ALL
        return 0

    def _spread(self, top: LedgerBlock, looked: int) -> Sliced[int]:
        """The tiers due of a block changed: update the blocks below it, down to those for which
        nothing changes. looked: blocks processed in this slice so far, as is the result."""
        tree = self.tree
        node: LedgerBlock | None = top.child
        while node is not None:
            below = self.update(node)
            if below:
                node.reasons[LAST] = top.reasons[LAST]
                for bit in BITS[node.tiers]:
                    node.reasons[bit] = top.reasons[LAST]
            looked += 1
            if looked >= tree.step:
                looked = 0
                top.pins += 1  # the fact continues from here
                node.pins += 1
                yield from tree.pause()
                tree.unpin(node)
                tree.unpin(top)
            if below and node.child is not None:
                node = node.child
                continue
            while node is not None and node is not top and node.right is None:
                node = node.parent
            node = None if node is None or node is top else node.right
        return looked

    # -- orphans

    def attach_found(self, message: PathsFound) -> Iterator[None]:
        """Add the resident blocks of these whose parents are in the tree."""
        looked, tree, orphans = 0, self.tree, self.orphans
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
                    parent = tree.blocks.get(parent_hash)
                    if parent is not None or (is_root and not i):
                        self._attach(block_hash, parent, inputs)
                    else:
                        orphans.wait(block_hash, inputs)
                parent_hash = block_hash
                looked += 1
                if not looked % tree.step:
                    yield from self._attach_orphans()
                    yield
                    tree.version += 1
        yield from self._attach_orphans()
        yield from tree.end()

    def _attach(self, block_hash: bytes, parent: LedgerBlock | None, inputs: HashInputs) -> None:
        """Add an orphan to the tree. It has no children yet. It counts as covered by a finished
        request, since one brought it to storage."""
        added = self._learn(block_hash, parent, inputs)
        added.finished = True
        added.reasons[LAST] = added.reasons[int(Tier.STORAGE)] = REASON_NUMBERS[Reason.STORED]
        self.update(added)

    def _attach_orphans(self) -> Iterator[None]:
        """Add the orphans whose parents have been added, and the orphans below them."""
        looked = 0
        while (found := self.orphans.next_attachable(self.tree)) is not None:
            self._attach(*found)
            looked += 1
            if not looked % self.tree.step:
                yield
                self.tree.version += 1

    # -- checks, between whose slices the ledger may change

    @property
    def _check_step(self) -> int:
        """Blocks of one slice of a check. Each costs up to 20 microseconds of cache misses."""
        return max(1, self.tree.step // 16)

    def check(self) -> None:
        finish(self.check_steps())

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the ledger is inconsistent. Each block is checked alone. Counts over
        all blocks are compared if nothing has changed since the beginning."""
        tree, version, step = self.tree, self.tree.version, self._check_step
        blocks = idle = 0
        dirty = [0] * len(self.sinks)
        for blocks, block in enumerate(tree.scan(), 1):
            self._check_block(block)
            idle += block in tree.idle
            for view in self.sinks:
                dirty[view.index] += block in view.dirty
            if not blocks % step:
                yield
        keys = iter(self.orphans.tiers)  # broken once the version has changed
        while version == tree.version and (some := list(islice(keys, step))):
            for block_hash in some:
                fault = self.orphans.fault(block_hash, tree)
                _require(not fault, fault)
            yield
        if version == tree.version:
            waiting, orphans = len(self.orphans.waiting), len(self.orphans.tiers)
            pending = [view.pending for view in self.sinks]
            _require(waiting <= orphans, "a waiting orphan on no tier")
            _require(blocks == len(tree.blocks), "a block without a place in the order")
            _require(dirty == pending, "a difference of a block that is not in the tree")
            _require(idle == len(tree.idle), "an idle block that is not in the tree")
            _require(
                tree.changing > 0 or idle <= tree.idle_limit,
                f"{idle} idle blocks, the limit is {tree.idle_limit}",
            )

    def _check_block(self, block: LedgerBlock) -> None:
        tree, parent = self.tree, block.parent
        _require(tree.blocks.get(block.hash) is block, "a block under another hash")
        if parent is not None:
            _require(tree.blocks.get(parent.hash) is parent, "a block whose parent was removed")
            before, after = block.left, block.right
            linked = (parent.child if before is None else before.right) is block
            linked = linked and (after is None or after.left is block)
            _require(linked, "a block that is not among the children of its parent")
        _require(
            block.child is not None or not block.idle() or block in tree.idle,
            "an idle block that is not among the idle ones",
        )
        for sink in self.sinks:
            view, due = block.views[sink.index], block.due[sink.index]
            _require(
                (due != view) == (block in sink.dirty) or bool(block.pins and tree.changing),
                "a difference that is not pending, or a pending one that is none",
            )
            _require(
                block.token_addressed or not (view and sink.filter.by_tokens),
                "a sink addressed by tokens was sent a block that tokens do not identify",
            )
            if tree.changing:
                continue
            above_due = self._above_first(block) if parent is None else parent.due[sink.index]
            accepted = sink.filter.accepts(block)
            expected = sink.closed[above_due << SHIFT | block.tiers] if accepted else 0
            # A root is another one before the ledger is sent that (`Roots.renew`).
            leaving = parent is None and not expected
            _require(
                due == expected or leaving,
                "what is due of a block does not follow from the block above",
            )
            if parent is not None:
                below, above = view | view >> UNSURE, parent.views[sink.index]
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
        over, found, expected = pace(self._check_step), 0, ShardedDict[int]()
        for block, due in self.announceable(view.filter, tiers, expected):
            if over():
                yield
            held = (
                block.views[view.index] & TIERS if mirror is None else tiers_of(mirror, block.hash)
            )
            found += held.bit_count()
            if due != held:
                differing.add(block.hash)
        if mirror is not None and found != sum(map(len, mirror.values())):
            for block_hash in chain.from_iterable(map(list, mirror.values())):
                if over():
                    yield
                if block_hash not in self.blocks:
                    differing.add(block_hash)
        yield from expected.free()
        return differing

    def announceable(
        self, sink: SinkFilter, tiers: Tiers, expected: ShardedDict[int]
    ) -> Iterator[tuple[LedgerBlock, int]]:
        """Every block whose path is known, parents before children, and the tiers on which it would
        be announced to a sink with this filter if `tiers` held these blocks. expected: filled with
        the announced tiers by block hash, for the caller to free in slices."""
        closed = sink.closed()
        for block in self.tree.scan():
            above = (
                self._above_first(block)
                if block.parent is None
                else expected.of(block.parent.hash).get(block.parent.hash, 0)
            )
            due = closed[above << SHIFT | tiers_of(tiers, block.hash)] if sink.accepts(block) else 0
            if due:
                expected.of(block.hash)[block.hash] = due
            yield block, due


def tiers_of(tiers: Tiers, block_hash: bytes) -> int:
    """The set of tiers that hold a block."""
    return sum(tier for tier, hashes in tiers.items() if block_hash in hashes)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
