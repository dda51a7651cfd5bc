"""Paths and matching on the native tree and on its twin, every result compared, every device block
followed.

`REACHED` counts the situations met, so that a test can tell that they were.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from kvactors.native import HOST, LOADING, OFFLOADING, BlockTree, Path
from tests.support.path_model import NONE, Node, PathModel
from tests.support.tree_model import TreeModel

ROOTS = [hashlib.sha256(b"one").digest(), hashlib.sha256(b"two").digest()]
EXTRAS = [b"", b"image", b"sound"]
MAX_PATHS = 5
MAX_BLOCKS = 6

REACHED: Counter[str] = Counter()


@dataclass
class Trees:
    native: BlockTree
    model: TreeModel


@dataclass
class Lease:
    native: Path
    model: PathModel
    trees: Trees


@dataclass
class Flight:
    """A load or an offload in flight: node ids of both sides."""

    trees: Trees
    native: NDArray[np.uint32]
    model: NDArray[np.uint32]

    def nodes(self) -> list[Node]:
        return [self.trees.model.nodes[int(i)] for i in self.model]


def both(native: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
    """Both results, or None if both refuse with a ValueError."""
    try:
        expected = model()
    except ValueError:
        try:
            result = native()
        except ValueError:
            return None
        raise AssertionError(f"the native side gives {result}, the model refuses") from None
    return native(), expected


which = st.integers(0, MAX_PATHS - 1)
small = st.integers(0, MAX_BLOCKS)
short_of = st.integers(-1, 2)  # fewer than may be asked for, and one too many is refused
blocks_of_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=MAX_BLOCKS)


class PathRules(RuleBasedStateMachine):
    """Paths, matching and giving back. The machine's other half moves blocks."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        capacity=st.sampled_from([0, 100]),
        eager=st.booleans(),
    )
    def start(self, block_size: int, capacity: int, eager: bool) -> None:
        """eager: blocks are hashed when they enter the tree, and not when a rule asks."""
        self.size = block_size
        self.capacity = capacity
        self.eager = eager
        self.trees = self.new_trees()
        self.all_trees = [self.trees]
        self.leases: list[Lease] = []
        self.loads: list[Flight] = []
        self.offloads: list[Flight] = []
        self.out: set[int] = set()  # device blocks that the test holds

    def new_trees(self) -> Trees:
        return Trees(
            BlockTree(self.size, self.capacity, eager_hashes=self.eager),
            TreeModel(self.size, self.capacity),
        )

    # -- device blocks

    def take(self, count: int) -> list[int]:
        free = [block for block in range(len(self.out) + count) if block not in self.out][:count]
        self.out.update(free)
        return free

    def give(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks), "a block was freed twice at once"
        assert set(blocks) <= self.out, "a block was freed that nobody has"
        self.out -= set(blocks)

    # -- comparing

    def same(self, name: str, trees: Trees, *args: Any, lease: Lease | None = None) -> Any:
        """Call a method of both trees and compare. None if both refused."""
        native_args = args if lease is None else (lease.native, *args)
        model_args = args if lease is None else (lease.model, *args)
        result = both(
            lambda: getattr(trees.native, name)(*native_args),
            lambda: getattr(trees.model, name)(*model_args),
        )
        if result is None:
            REACHED[f"{name} refused"] += 1
            return None
        assert result[0] == result[1], name
        return result[0]

    def lease(self, index: int) -> Lease:
        return self.leases[index % len(self.leases)]

    # -- paths

    @precondition(lambda self: len(self.leases) < MAX_PATHS)
    @rule(
        root=st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[1]]),
        kinds=blocks_of_tokens,
        pin=st.booleans(),
        more=st.integers(0, 2),
        image=st.sampled_from([0, 0, 1, 2]),
    )
    def new_path(self, root: bytes, kinds: list[int], pin: bool, more: int, image: int) -> None:
        lease = Lease(Path(self.size, root), PathModel(self.size, root), self.trees)
        tokens = [kind for kind in kinds for _ in range(self.size)] + [0] * (more % self.size)
        lease.native.extend(tokens)
        lease.model.extend(tokens)
        self.leases.append(lease)
        if image:
            self.set_extra(len(self.leases) - 1, 1, EXTRAS[image])
        if pin:
            self.pin(len(self.leases) - 1, -1)

    @precondition(lambda self: self.leases)
    @rule(index=which, kind=st.sampled_from([0, 0, 1]), count=st.integers(0, 4))
    def extend(self, index: int, kind: int, count: int) -> None:
        lease = self.lease(index)
        if lease.native.num_full_blocks < MAX_BLOCKS:
            lease.native.extend(np.full(count, kind, dtype=np.uint16))
            lease.model.extend([kind] * count)

    @precondition(lambda self: self.leases)
    @rule(index=which, block=st.integers(0, 2), extra=st.sampled_from(EXTRAS))
    def set_extra(self, index: int, block: int, extra: bytes) -> None:
        lease = self.lease(index)
        if (
            both(
                lambda: lease.native.set_extra(block, extra),
                lambda: lease.model.set_extra(block, extra),
            )
            is None
        ):
            REACHED["set_extra refused"] += 1

    @precondition(lambda self: self.leases)
    @rule(index=which, start=small, stop=small)
    def name_blocks(self, index: int, start: int, stop: int) -> None:
        lease = self.lease(index)
        result = both(
            lambda: lease.native.hashes(start, stop), lambda: lease.model.hashes(start, stop)
        )
        assert result is None or result[0] == result[1]

    @precondition(lambda self: self.leases)
    @rule(index=which, upto=small)
    def provide(self, index: int, upto: int) -> None:
        """Device blocks for every position below `upto` that has none."""
        lease = self.lease(index)
        table = lease.native.blocks()
        for position in range(upto):
            if position >= len(table) or (
                table[position] == NONE and not lease.native.is_shared(position)
            ):
                fresh = self.take(1)
                lease.native.assign(position, fresh)
                lease.model.assign(position, fresh)

    @precondition(lambda self: self.leases)
    @rule(index=which, start=st.integers(0, MAX_BLOCKS + 2))
    def assign_again(self, index: int, start: int) -> None:
        """Overwriting a private block hands the old one back. A gap or the tree's block is
        refused."""
        lease = self.lease(index)
        before, fresh = lease.native.blocks()[start : start + 2], self.take(2)
        if (
            both(
                lambda: lease.native.assign(start, fresh), lambda: lease.model.assign(start, fresh)
            )
            is None
        ):
            REACHED["assign refused"] += 1
            self.give(fresh)
        else:
            self.give([block for block in before if block != NONE])

    @precondition(lambda self: self.leases)
    @rule(index=which, position=small)
    def replace(self, index: int, position: int) -> None:
        lease = self.lease(index)
        stood = lease.native.blocks()[position : position + 1]
        was_private = [
            block for block in stood if block != NONE and not lease.native.is_shared(position)
        ]
        fresh = self.take(1)
        try:
            lease.model.tree, kept = lease.model.tree, lease.model.num_committed
            lease.trees.model.replace(lease.model, position, fresh[0])
        except ValueError:
            self.same("replace", lease.trees, position, fresh[0], lease=lease)
            self.give(fresh)
            return
        assert kept <= position
        REACHED["replace a block being loaded"] += (
            bool(stood) and not was_private and stood[0] != NONE
        )
        lease.trees.native.replace(lease.native, position, fresh[0])
        self.give(was_private)

    # -- matching

    @precondition(lambda self: self.leases)
    @rule(index=which, limit=st.integers(-1, MAX_BLOCKS))
    def pin(self, index: int, limit: int) -> None:
        lease = self.lease(index)
        if not lease.native.num_held:
            lease.trees = self.trees
        known = lease.trees.model._walk(lease.model, limit)
        offloading = [bool(node.bits & OFFLOADING) for node in known]
        if self.same("pin", lease.trees, limit, lease=lease) is None:
            return
        run = lease.native.num_committed
        REACHED["match again what is being evicted"] += any(offloading[:run])
        REACHED["meet an eviction below a hole"] += any(offloading[run:])
        REACHED["join a load"] += any(node.bits & LOADING for node in known)
        REACHED["hit on the host"] += any(node.bits == HOST for node in known)
        REACHED["hit with an extra key"] += any(node.extra for node in known)
        REACHED["hit"] += run > 0

    @precondition(lambda self: self.leases)
    @rule(
        index=which,
        limit=st.integers(-1, MAX_BLOCKS),
        end=st.sampled_from(["granted", "waits", "refused"]),
    )
    def pin_without_a_use(self, index: int, limit: int, end: str) -> None:
        """A request is matched before it is known whether it has its blocks."""
        lease = self.lease(index)
        if lease.native.num_held:
            return
        lease.trees = self.trees
        if self.same("pin", lease.trees, limit, False, lease=lease) is None:
            return
        nodes = lease.model.nodes
        leaving = any(node.bits & OFFLOADING for node in nodes[: lease.native.num_committed])
        if end == "refused":
            freed = self.same("release", lease.trees, lease=lease)
            assert freed == []
            REACHED["a refused request leaves evictions alone"] += leaving
            return
        self.same("keep", lease.trees, end == "granted", lease=lease)
        REACHED["keep what is being evicted"] += leaving

    @precondition(lambda self: self.leases)
    @rule(index=which, limit=st.integers(-1, MAX_BLOCKS))
    def peek(self, index: int, limit: int) -> None:
        self.same("peek", self.trees, limit, lease=Lease(*self.probe(index), self.trees))
        run = self.same(
            "referenced_run", self.trees, limit, lease=Lease(*self.probe(index), self.trees)
        )
        REACHED["referenced by another path"] += bool(run)

    def probe(self, index: int) -> tuple[Path, PathModel]:
        """A fresh path with the tokens and extra keys of one we have."""
        model = self.lease(index).model
        native, twin = Path(self.size, model.root), PathModel(self.size, model.root)
        for path in (native, twin):
            path.extend(model.ids)
            for block, extra in model.extras.items():
                path.set_extra(block, extra)
        return native, twin

    @precondition(lambda self: self.leases)
    @rule(index=which, less=short_of)
    def trim(self, index: int, less: int) -> None:
        lease = self.lease(index)
        held = max(lease.native.num_held - less, 0)
        before = lease.native.num_held
        freed = self.same("trim", lease.trees, held, lease=lease)
        REACHED["trim"] += freed is not None and held < before
        self.give(freed or [])

    @precondition(lambda self: self.leases)
    @rule(index=which, less=short_of)
    def retreat(self, index: int, less: int) -> None:
        """Blocks of a media item that is cached in part: they are no longer shared, and the path
        gets others to compute into."""
        lease = self.lease(index)
        before, committed = lease.native.num_held, lease.native.num_committed
        blocks = max(min(before, committed) - less, 0)
        freed = self.same("retreat", lease.trees, blocks, lease=lease)
        REACHED["retreat from committed blocks"] += freed is not None and blocks < committed
        REACHED["retreat of a retired tree's last use"] += bool(freed)
        self.give(freed or [])

    @precondition(lambda self: self.leases)
    @rule(index=which, less=st.integers(-1, 2 * MAX_BLOCKS), extra=st.sampled_from([*EXTRAS, b""]))
    def truncate(self, index: int, less: int, extra: bytes) -> None:
        """Rejected tokens, and blocks that were reserved for tokens, go. Other tokens at the same
        positions get other hashes."""
        lease = self.lease(index)
        tokens = max(lease.native.num_tokens - less, 0)
        held, blocks = lease.native.num_held, lease.native.num_blocks
        freed = self.same("truncate", lease.trees, tokens, extra, lease=lease)
        if freed is None:
            return
        REACHED["truncate drops references"] += lease.native.num_held < held
        REACHED["truncate drops blocks"] += lease.native.num_blocks < blocks
        REACHED["truncate within a block"] += bool(extra)
        self.give(freed)

    @precondition(lambda self: self.leases)
    @rule(index=which, forget=st.booleans())
    def release(self, index: int, forget: bool) -> None:
        lease = self.lease(index)
        retired, loading = (
            lease.trees.native.retired,
            any(node.bits & LOADING for node in lease.model.nodes),
        )
        private = sum(
            not shared and block != NONE
            for block, shared in zip(lease.model.table, lease.model.shared, strict=True)
        )
        freed = self.same("release", lease.trees, lease=lease) or []
        REACHED["release while loading"] += loading
        REACHED["release the last use of a retired block"] += retired and len(freed) > private
        self.give(freed)
        if forget:
            self.leases.remove(lease)

    @precondition(lambda self: self.leases)
    @rule(index=which, start=small, less=short_of)
    def mark_announced(self, index: int, start: int, less: int) -> None:
        lease = self.lease(index)
        upto = max(lease.native.num_held - less, 0)
        start = min(start, upto)
        held = lease.model.nodes[start:upto]
        again = any(not node.announced and node.hits > 1 for node in held) and any(
            node.announced for node in held
        )
        REACHED["some announced, some not"] += again
        self.same("mark_announced", lease.trees, start, upto, lease=lease)

    @precondition(lambda self: self.leases)
    @rule(index=which, start=small, less=short_of, min_hits=st.integers(0, 3))
    def worth_saving(self, index: int, start: int, less: int, min_hits: int) -> None:
        lease = self.lease(index)
        upto = max(lease.native.num_held - less, 0)
        positions = self.same(
            "worth_saving", lease.trees, min(start, upto), upto, min_hits, lease=lease
        )
        REACHED["worth saving after more hits"] += min_hits > 1 and bool(positions)
