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
  a tree (see `selection`).

A view may be unsure after a lost answer (`LedgerBlock.views`). The rule then holds for what the
sink may have, and for what it has if it took a leading part of the tasks that it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvactors.flush_notifier.blocks import BITS, LAST, REASON_NUMBERS, LedgerBlock, accepts
from kvactors.flush_notifier.checks import check_steps
from kvactors.flush_notifier.filter import SHIFT, SinkFilter
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    PathsFound,
    RequestScope,
    TierCleared,
)
from kvactors.flush_notifier.scopes import RootOf, Scopes, rescope
from kvactors.flush_notifier.sink_view import SinkView
from kvactors.flush_notifier.steps import Steps, finish
from kvactors.flush_notifier.tree import LedgerTree
from kvactors.flush_notifier.unnamed import UnnamedBlocks, name_blocks, place_blocks
from kvactors.identity import hash_of_block
from kvactors.types import HASH_BYTES, Reason, Tier, count_hashes, hash_at

IDLE_LIMIT = 16_384
"""Idle blocks kept by default."""

STEP = 256
"""Blocks processed in one step by default."""

DEVICE = int(Tier.DEVICE)

Fact = PathCached | BlocksAdded | BlocksRemoved | TierCleared | PathsFound | NamespaceChanged


class Ledger:
    """Facts in, differences out. Facts run in steps. No other fact may come between the steps.

    Args:
        block_size: tokens of a block.
        filters: one per sink.
        idle_limit: idle blocks kept.
        step: blocks processed in one step.
        token_root: root hash of the only scope whose blocks go to sinks that address blocks by
            tokens alone.
        root_of, namespace: see `Scopes`.

    Attributes:
        tree: the blocks whose paths are known.
        sinks: the view of each sink.
        unnamed: resident blocks whose paths are not known.
        scopes: the roots that requests begin at.
    """

    def __init__(
        self,
        block_size: int,
        filters: Sequence[SinkFilter],
        idle_limit: int = IDLE_LIMIT,
        step: int = STEP,
        token_root: bytes = b"",
        root_of: RootOf | None = None,
        namespace: str = "",
    ) -> None:
        self.block_bytes = 4 * block_size
        self.tree = LedgerTree(idle_limit, step)
        self.sinks = [SinkView(self.tree, i, one) for i, one in enumerate(filters)]
        self.unnamed = UnnamedBlocks()
        self.scopes = Scopes(root_of, namespace)
        self._token_root = token_root if any(one.by_tokens for one in filters) else b""
        # the same views with what `update` reads for every block
        self._rules = [(view, view.closed, view.conditional, view.dirty) for view in self.sinks]
        self._announces_full = [view for view in self.sinks if view.filter.announces_full]

    @property
    def blocks(self) -> dict[bytes, LedgerBlock]:
        """Blocks whose paths are known, by hash."""
        return self.tree.blocks

    # -- facts

    def apply(self, fact: Fact) -> Iterator[None]:
        """The steps of a fact."""
        if isinstance(fact, BlocksAdded):
            return self.gain(fact.hashes, fact.tier, fact.reason)
        if isinstance(fact, BlocksRemoved):
            return self.lose(fact.hashes, fact.tier, fact.reason)
        if isinstance(fact, PathCached):
            return self.announce(fact)
        if isinstance(fact, PathsFound):
            return self.name(fact)
        if isinstance(fact, TierCleared):
            return self.clear(fact.tier, fact.reason)
        return rescope(self, fact.namespace)

    def announce(self, message: PathCached) -> Iterator[None]:
        """The first `count` blocks of a path are resident. The message names all of them.

        Raises:
            ValueError: the tokens are not as many as the block hashes need. Nothing changed.
        """
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
        tree.version += 1
        looked, extra_keys = 0, dict(message.extra_keys)
        for i in range(total):
            block_hash = hash_at(message.hashes, i)
            block = tree.blocks.get(block_hash)
            if block is None:
                tokens = message.tokens[i * self.block_bytes : (i + 1) * self.block_bytes]
                extra_key = extra_keys.get(message.start + i, b"")
                block = self.learn(
                    block_hash, parent, parent_hash, tokens, message.scope, extra_key
                )
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
                yield from tree.trim()
                yield
                tree.unpin(block)
                tree.version += 1
        yield from place_blocks(self)
        yield from tree.trim()

    def name(self, message: PathsFound) -> Iterator[None]:
        """Blocks found in storage have these parents and tokens."""
        yield from name_blocks(self, message)
        yield from self.tree.trim()

    def gain(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These blocks are resident on `tier`."""
        return self._change(hashes, int(tier), reason, gained=True)

    def lose(self, hashes: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These blocks left `tier`."""
        return self._change(hashes, int(tier), reason, gained=False)

    def _change(self, hashes: bytes, bit: int, reason: Reason, *, gained: bool) -> Iterator[None]:
        tree, looked, number = self.tree, 0, REASON_NUMBERS[reason]
        unnamed = self.unnamed.gain if gained else self.unnamed.lose
        tree.version += 1
        for i in range(count_hashes(hashes)):
            if looked >= tree.step:
                looked = 0
                yield from tree.trim()
                yield
                tree.version += 1
            looked += 1
            block_hash = hash_at(hashes, i)
            block = tree.blocks.get(block_hash)
            if block is None:
                unnamed(block_hash, bit)
            elif gained or block.tiers & bit:
                block.tiers = block.tiers | bit if gained else block.tiers & ~bit
                block.reasons[LAST] = block.reasons[bit] = number
                if self.update(block) and block.child is not None:
                    looked = yield from self._spread(block, looked)
        yield from tree.trim()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        """No block is resident on `tier`."""
        tree, bit, number = self.tree, int(tier), REASON_NUMBERS[reason]
        left = 0  # the tiers that still hold something
        tree.spreading += 1
        for i, block in enumerate(tree.order, 1):  # parents first, so the due state above is final
            if block.tiers & bit:
                block.tiers &= ~bit
                block.reasons[LAST] = block.reasons[bit] = number
            self.update(block)
            left |= block.tiers
            if not i % tree.step:
                tree.version += 1
                yield from tree.trim()
                yield
        tree.spreading -= 1
        tree.version += 1
        yield from tree.trim()
        yield from self.unnamed.clear(bit, tree.step)
        if reason is Reason.CLEAR:
            for view in self.sinks:
                if view.filter.takes_clear and not view.table[left]:
                    view.clear_due = True

    # -- the due state

    def learn(
        self,
        block_hash: bytes,
        parent: LedgerBlock | None,
        parent_hash: bytes,
        tokens: bytes,
        scope: RequestScope,
        extra_key: bytes,
    ) -> LedgerBlock:
        """Add a block that no path has named before. `update` must follow. parent: None exactly if
        `parent_hash` is a root hash."""
        block = LedgerBlock(
            block_hash, parent, parent_hash, tokens, scope, len(self.sinks), extra_key
        )
        block.tiers = self.unnamed.place(block_hash)
        self.tree.add(block)
        if self._token_root and (
            parent.token_addressed if parent is not None else parent_hash == self._token_root
        ):
            # a block with an extra key has another hash
            block.token_addressed = block_hash == hash_of_block(parent_hash, tokens)
        return block

    def update(self, block: LedgerBlock) -> bool:
        """A block changed: compute its due state, and compare that with the view of each sink.

        Returns:
            Whether the blocks below depend on the change. Then `_spread` must follow before the
            next block.
        """
        above, tiers, spread = block.parent, block.tiers, False
        due_before, views = block.due, block.views
        first = self.scopes.above_first(block) if above is None else 0
        for sink, (view, closed, conditional, dirty) in enumerate(self._rules):
            due = closed[(first if above is None else above.due[sink]) << SHIFT | tiers]
            if due and conditional and not accepts(view.filter, block):
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

    def due_of(self, block: LedgerBlock, view: SinkView) -> int:
        """The tiers due of a block to a sink, from those due of the block above."""
        above = (
            self.scopes.above_first(block) if block.parent is None else block.parent.due[view.index]
        )
        return view.closed[above << SHIFT | block.tiers] if accepts(view.filter, block) else 0

    def _spread(self, top: LedgerBlock, looked: int) -> Steps[int]:
        """The tiers due of a block changed: update the blocks below it, down to those for which
        nothing changes.

        Args:
            top: the block.
            looked: blocks processed in this step so far. The result is the same at the end.
        """
        tree = self.tree
        tree.spreading += 1
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
                yield from tree.trim()
                yield
                tree.unpin(node)
                tree.unpin(top)
                tree.version += 1
            if below and node.child is not None:
                node = node.child
                continue
            while node is not None and node is not top and node.right is None:
                node = node.parent
            node = None if node is None or node is top else node.right
        tree.spreading -= 1
        return looked

    # -- inspection

    def check(self) -> None:
        """All steps of `check_steps`."""
        finish(check_steps(self))

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the ledger is inconsistent. It may change between the steps."""
        return check_steps(self)
