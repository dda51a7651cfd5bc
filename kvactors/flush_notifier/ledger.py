"""The ledger: which blocks are resident where, the view of each sink, and the difference. Pure
state.

It is a tree. It learns tokens and block hashes from announced paths, and so can name the complete
path when a block goes. Facts about one block come from several actors, in any order: a block that
left one tier and has not reached the next, or that a path named before its tier did, stays for a
while although it is nowhere ("limbo"). Otherwise there is an entry only for a block that is
resident, in the view of a sink, or above such a block.

**The tree rule.** What a sink has been sent is a tree, after every single event in the order sent:
a block is in the sink's view only while the block above it is in the view on some tier, and on
DEVICE only while the block above it is in the view on DEVICE. (An index that is a radix tree of the
device, or that finds a block's place by its parent, drops anything else.) Two parts keep it:

* What is due of a block (`Entry.dues`) is what tiers hold it as far as the rule allows, given what
  is due of the block above: the closed
  truth. A change of it spreads to the blocks below. A block whose path is interrupted is resident
  here and not due: it cannot be hit.
* A batch takes differences and orders them so that each step between the view and what is due is a
  tree (see `selection`).

A view may be unsure after a lost answer (`Entry.states`). The rule then holds for what the sink may
have, and for what it really has, if it took a leading part of the tasks that it was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvactors.flush_notifier import batches
from kvactors.flush_notifier.checks import check_steps
from kvactors.flush_notifier.messages import Announced, Named, Origin
from kvactors.flush_notifier.naming import Waiting, naming, placing
from kvactors.flush_notifier.order import Order
from kvactors.flush_notifier.runs import BITS, LAST, Batch, Entry, Holding, Steps, counts, finish
from kvactors.flush_notifier.scopes import RootOf, above_first
from kvactors.flush_notifier.view import SHIFT, SinkView
from kvactors.identity import block_hash
from kvactors.types import ALL_TIERS, KEY_BYTES, Reason, Tier, count_keys, key_at

LIMBO = 16_384
"""Blocks that are nowhere and yet remembered, unless told otherwise."""

SLICE = 256
"""Blocks looked at in one step."""

DEVICE = int(Tier.DEVICE)


class Ledger:
    """views: one per sink. limbo: blocks remembered although they are nowhere. takes_clear: the
    sinks to which "everything is gone" may be told as one task. by_name: the sinks that need no
    paths. step: blocks looked at in one step. token_root: the root hash of the only scope whose
    blocks go to sinks that address them by tokens alone. full: the sinks that are sent all blocks
    of a request at its finish."""

    def __init__(
        self,
        block_size: int,
        views: list[SinkView],
        limbo: int = LIMBO,
        takes_clear: Collection[int] = (),
        by_name: Collection[int] = (),
        step: int = SLICE,
        token_root: bytes = b"",
        full: Collection[int] = (),
    ) -> None:
        self._token_root = token_root if any(view.by_tokens for view in views) else b""
        self.step = step
        self.block_bytes = 4 * block_size
        self.views = views
        self.entries: dict[bytes, Entry] = {}
        # of the same entries: parents before children, and none is missed or met twice while others
        # come and go
        self.order = Order()
        self.version = 0  # counts the steps that may have changed something
        self.unnamed: dict[
            bytes, int
        ] = {}  # resident (so as many as there are blocks at most), but no path has named them yet
        self.waiting = (
            Waiting()
        )  # of the unnamed: those whose parents have no entry, with what their hashes are made of
        self.clock = 0  # counts the differences that began
        self.dirty: list[dict[Entry, int]] = [
            {} for _ in views
        ]  # per sink, when they began to differ, in that order
        self._sinks = [
            (view.closed(), view.at_finish or view.by_tokens, dirty)
            for view, dirty in zip(views, self.dirty, strict=True)
        ]
        self.coalesced = [0] * len(views)
        self._full, self._takes_clear = tuple(full), takes_clear
        self.root_of: RootOf | None = None  # see `scopes`; without, every root is one of now
        self.by_name = by_name
        self.cleared: set[int] = (
            set()
        )  # of those sinks: everything they believe was gone at once, and they have not been told
        self._tables = [view.table() for view in views]
        self.limbo: dict[Entry, None] = {}
        self.trimming = 0  # calls of `trim` that have steps to come
        self.settling = 0  # ends of deliveries that have steps to come
        self.spreading = 0  # changes that have not reached all blocks below them
        self.limbo_bound = max(1, limbo)

    # -- what is true: steps of at most SLICE blocks, between which others may run (but no other
    #   fact may come)

    def announce(self, message: Announced) -> Iterator[None]:
        """Blocks of a path are resident: the first `count` of those in the message. It names all of
        them."""
        total, count = count_keys(message.keys), message.count
        if len(message.tokens) != self.block_bytes * total:
            raise ValueError("an announced path needs a block hash for each block")
        bit, reason, finished = (
            int(message.tier),
            message.reason,
            message.reason is Reason.REQUEST_FINISH,
        )
        parent, parent_key = (
            self.entries.get(message.parent) if message.start else None,
            message.parent,
        )
        if (
            message.start and parent is None
        ):  # this incarnation has not been sent the path above yet: it names them later
            yield from self.gain(message.keys[: count * KEY_BYTES], message.tier, reason)
            return
        self.version += 1
        looked, extra_keys = 0, dict(message.extra_keys)
        for i in range(total):
            key = key_at(message.keys, i)
            entry = self.entries.get(key)
            if entry is None:
                tokens = message.tokens[i * self.block_bytes : (i + 1) * self.block_bytes]
                extra_key = extra_keys.get(message.start + i, b"")
                entry = self._learn(key, parent, parent_key, tokens, message.origin, extra_key)
            if i < count:
                entry.finished |= finished
                entry.truth |= bit
                entry.send_again(self._full if finished else ())
                entry.reasons[LAST] = entry.reasons[bit] = reason
            if self._look(entry) and entry.child is not None:
                looked = yield from self._spread(entry, looked)
            parent, parent_key = entry, key
            looked += 1
            if looked >= self.step:
                looked = 0
                entry.held += 1  # it must not be forgotten before its child is there
                yield from self.trim()
                yield
                self.let_go(entry)
                self.version += 1
        yield from placing(self)
        yield from self.trim()

    def name(self, message: Named) -> Iterator[None]:
        """Blocks that were found in storage have these parents and tokens."""
        yield from naming(self, message)
        yield from self.trim()

    def _learn(
        self,
        key: bytes,
        parent: Entry | None,
        parent_key: bytes,
        tokens: bytes,
        origin: Origin,
        extra_key: bytes,
    ) -> Entry:
        """A block that no path has named before. parent: None if `parent_key` is a root, and at no
        other time. `_look` must follow."""
        entry = Entry(key, parent, parent_key, tokens, origin, len(self.views), extra_key)
        entry.truth = self.unnamed.pop(key, 0)
        self.waiting.learned(key)
        self.entries[key] = entry
        self.order.add(entry)
        entry.link()
        if self._token_root and (
            parent.by_tokens if parent is not None else parent_key == self._token_root
        ):
            entry.by_tokens = key == block_hash(
                parent_key, tokens
            )  # a block with an extra key has another hash
        return entry

    def gain(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These are resident on `tier`."""
        bit, looked = int(tier), 0
        self.version += 1
        for i in range(count_keys(keys)):
            if looked >= self.step:
                looked = 0
                yield from self.trim()
                yield
                self.version += 1
            looked += 1
            key = key_at(keys, i)
            entry = self.entries.get(key)
            if entry is None:
                self.unnamed[key] = self.unnamed.get(key, 0) | bit
            else:
                entry.truth |= bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
                if self._look(entry) and entry.child is not None:
                    looked = yield from self._spread(entry, looked)
        yield from self.trim()

    def lose(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These left `tier`."""
        bit, looked = int(tier), 0
        self.version += 1
        for i in range(count_keys(keys)):
            if looked >= self.step:
                looked = 0
                yield from self.trim()
                yield
                self.version += 1
            looked += 1
            key = key_at(keys, i)
            entry = self.entries.get(key)
            if entry is None:
                if left := self.unnamed.pop(key, 0) & ~bit:
                    self.unnamed[key] = left
                else:
                    self.waiting.drop(key)
            elif entry.truth & bit:
                entry.truth &= ~bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
                if self._look(entry) and entry.child is not None:
                    looked = yield from self._spread(entry, looked)
        yield from self.trim()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        """Nothing is resident on `tier`."""
        bit = int(tier)
        left = 0  # the tiers that still hold something
        self.spreading += 1
        for i, entry in enumerate(self.order.up_to(self.order.last_number), 1):
            if entry.truth & bit:
                entry.truth &= ~bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
            self._look(
                entry
            )  # parents come before children, so what is due of the block above is final
            left |= entry.truth
            if not i % self.step:
                self.version += 1
                yield from self.trim()
                yield
        self.spreading -= 1
        self.version += 1
        yield from self.trim()
        nowhere: list[bytes] = []
        for i, (key, tiers) in enumerate(
            self.unnamed.items(), 1
        ):  # no other fact comes, so no name does
            if tiers & ~bit:
                self.unnamed[key] = tiers & ~bit
            else:
                nowhere.append(key)
            if not i % self.step:
                yield
        for i, key in enumerate(nowhere, 1):
            del self.unnamed[key]
            self.waiting.drop(key)
            if not i % self.step:
                yield
        if reason is Reason.CLEAR:
            self.cleared.update(sink for sink in self._takes_clear if not self._tables[sink][left])

    # -- the difference

    def _look(self, entry: Entry) -> bool:
        """An entry changed: see what is due of it now, and for which sinks that differs from their
        views. Whether the blocks below depend on what has changed: then `_spread` must follow
        before the next entry."""
        above, truth, dues, states, spread = (
            entry.parent,
            entry.truth,
            entry.dues,
            entry.states,
            False,
        )
        first = above_first(self.root_of, entry) if above is None else 0
        for sink, (closed, conditional, dirty) in enumerate(self._sinks):
            due = closed[(first if above is None else above.dues[sink]) << SHIFT | truth]
            if due and conditional and not counts(entry, self.views[sink]):
                due = 0
            if due != (before := dues[sink]):
                dues[sink] = due
                spread = spread or not due or not before or bool((due ^ before) & DEVICE)
            if due != states[sink]:
                if entry not in dirty:
                    self.clock += 1
                    dirty[entry] = self.clock
            elif entry in dirty:
                del dirty[entry]
                self.coalesced[sink] += not entry.held
        if not truth and entry.idle():
            self._remember(entry)
        return spread

    def due(self, entry: Entry, sink: int) -> int:
        """The set of tiers on which a block is to be announced, from that of the block above."""
        above = (
            above_first(self.root_of, entry) if entry.parent is None else entry.parent.dues[sink]
        )
        return (
            self._sinks[sink][0][above << SHIFT | entry.truth]
            if counts(entry, self.views[sink])
            else 0
        )

    def _spread(self, top: Entry, looked: int) -> Steps[int]:
        """What is due of a block changed: see what is due of the blocks below it, down to those for
        which nothing changes. looked: blocks looked at in this step so far; the result is the same
        at the end."""
        self.spreading += 1
        node: Entry | None = top.child
        while node is not None:
            below = self._look(node)
            if below:
                node.reasons[LAST] = top.reasons[LAST]
                for bit in BITS[node.truth]:
                    node.reasons[bit] = top.reasons[LAST]
            looked += 1
            if looked >= self.step:
                looked = 0
                top.held += 1  # it must not be forgotten before the fact has gone on from here
                node.held += 1
                yield from self.trim()
                yield
                self.let_go(node)
                self.let_go(top)
                self.version += 1
            if below and node.child is not None:
                node = node.child
                continue
            while node is not None and node is not top and node.right is None:
                node = node.parent
            node = None if node is None or node is top else node.right
        self.spreading -= 1
        return looked

    def compare(self, entry: Entry, sink: int) -> None:
        """A sink's view of an entry changed: see whether it differs now from what is due."""
        dirty = self.dirty[sink]
        if entry.dues[sink] != entry.states[sink]:
            if entry not in dirty:
                self.clock += 1
                dirty[entry] = self.clock
        elif entry in dirty:
            del dirty[entry]
            self.coalesced[sink] += not entry.held
        if not entry.truth and entry.idle():
            self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        """Keep an idle entry among the last idle ones. An entry that comes back into use loses its
        place when its turn comes."""
        self.limbo.pop(entry, None)
        self.limbo[entry] = None

    def let_go(self, entry: Entry) -> None:
        """One reference to an entry less, from outside of the tree."""
        entry.held -= 1
        if not entry.truth and entry.idle():
            self._remember(entry)

    def trim(self) -> Iterator[None]:
        """Forget the oldest idle entries beyond the bound. Runs at the end of a step only: within a
        step every entry that is idle by then has been remembered, so no entry that the step still
        refers to is forgotten."""
        if len(self.limbo) <= self.limbo_bound:
            return
        self.trimming += 1
        self.version += 1
        done = 0
        while len(self.limbo) > self.limbo_bound:
            oldest = next(iter(self.limbo))
            del self.limbo[oldest]
            entry: Entry | None = oldest
            while (
                entry is not None
                and not entry.children
                and entry.idle()
                and entry not in self.limbo
            ):
                del self.entries[entry.key]
                self.order.remove(entry)
                entry.unlink()
                entry = entry.parent
                if entry is not None:
                    done += 1
                    if not done % self.step:
                        entry.held += 1
                        yield
                        entry.held -= 1
                        self.version += 1
        self.trimming -= 1

    def pending(self, sink: int) -> int:
        """Blocks on which a sink's belief and the truth that is due differ."""
        return len(self.dirty[sink])

    def told_until(self, sink: int) -> int:
        """Every difference that began up to here (by `clock`) has been delivered to the sink, or
        has vanished."""
        return next(iter(self.dirty[sink].values()), self.clock + 1) - 1

    def take(self, sink: int, limit: int, epoch: int) -> Batch:
        """All steps of `taking`."""
        return finish(self.taking(sink, limit, epoch))

    def taking(self, sink: int, limit: int, epoch: int) -> Steps[Batch]:
        """See `batches.taking`."""
        return batches.taking(self, sink, limit, epoch)

    def delivered(self, sink: int, batch: Batch) -> None:
        """All steps of `delivering`."""
        finish(self.delivering(sink, batch))

    def delivering(self, sink: int, batch: Batch) -> Steps[None]:
        """See `batches.delivering`."""
        return batches.delivering(self, sink, batch)

    def refused(self, sink: int, batch: Batch) -> None:
        """All steps of `refusing`."""
        finish(self.refusing(sink, batch))

    def refusing(self, sink: int, batch: Batch) -> Steps[None]:
        """See `batches.refusing`."""
        return batches.refusing(self, sink, batch)

    def forget(self, sink: int) -> Iterator[None]:
        """See `batches.forget`."""
        return batches.forget(self, sink)

    def repeat(self, sink: int) -> Iterator[None]:
        """See `batches.repeat`."""
        return batches.repeat(self, sink)

    # -- for inspection

    def view(self, sink: int) -> Iterator[tuple[bytes, int]]:
        """What a sink was sent and took: block hashes and sets of tiers. What changes between two
        of them may or may not show."""
        for entry in self.order.up_to(self.order.last_number):
            if tiers := entry.states[sink] & ALL_TIERS.value:
                yield entry.key, tiers

    def holdings(self, sink: int, *, every: bool = False) -> Iterator[Holding]:
        """The same with all that a snapshot needs, parents before children. every: also blocks that
        the sink was sent as gone, or not at all."""
        for entry in self.order.up_to(self.order.last_number):
            if (tiers := entry.states[sink] & ALL_TIERS.value) or every:
                yield Holding(
                    entry.key,
                    entry.parent_key,
                    entry.depth - 1,
                    entry.tokens,
                    tiers,
                    entry.origin,
                    entry.extra_key,
                )

    def check(self) -> None:
        """AssertionError if counts and differences are not what the entries say."""
        finish(check_steps(self))

    def check_steps(self) -> Iterator[None]:
        """The same in steps, between which anything may happen."""
        return check_steps(self)
