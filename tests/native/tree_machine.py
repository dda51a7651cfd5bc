"""Paths and matching on the native tree and on its twin, every result compared, every device block
followed.

`REACHED` counts the calls of each method that were answered, and those that were refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvactors.native import LOADING, BlockTree, Path
from kvactors.types import split_hashes
from tests.support.path_model import NONE, PathModel
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


class TreeMachine:
    """Every operation of the tree."""

    def start(self, block_size: int, capacity: int, eager: bool, flat: bool = False) -> None:
        """eager: blocks are hashed when they enter the tree, and not when a rule asks. flat: of the
        paths, whose blocks differ from each other then."""
        self.size = block_size
        self.capacity = capacity
        self.eager = eager
        self.flat = flat
        self.trees = self.new_trees()
        self.all_trees = [self.trees]
        self.leases: list[Lease] = []
        self.loads: list[Flight] = []
        self.offloads: list[Flight] = []
        self.out: Counter[int] = Counter()  # device blocks that the test holds, by owners

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
        assert Counter(blocks) <= self.out, "a block was freed that nobody has"
        self.out -= Counter(blocks)

    # -- comparing

    def same(self, name: str, trees: Trees, *args: Any, lease: Lease | None = None) -> Any:
        """Call a method of both trees and compare. None if both refused."""
        native_args = args if lease is None else (lease.native, *args)
        model_args = args if lease is None else (lease.model, *args)
        result = both(
            lambda: getattr(trees.native, name)(*native_args),
            lambda: getattr(trees.model, name)(*model_args),
        )
        REACHED[f"{name} {'answered' if result else 'refused'}"] += 1
        if result is None:
            return None
        assert result[0] == result[1], name
        return result[0]

    def lease(self, index: int) -> Lease:
        return self.leases[index % len(self.leases)]

    # -- paths

    def new_path(self, root: bytes, kinds: list[int], pin: bool, more: int, image: int) -> None:
        lease = Lease(*self.empty_path(root), self.trees)
        tokens = [kind for kind in kinds for _ in range(self.size)] + [0] * (more % self.size)
        lease.native.extend(tokens)
        lease.model.extend(tokens)
        self.leases.append(lease)
        if image:
            self.set_extra(len(self.leases) - 1, 1, EXTRAS[image])
        if pin:
            self.pin(len(self.leases) - 1, -1)

    def empty_path(self, root: bytes) -> tuple[Path, PathModel]:
        return Path(self.size, root, self.flat), PathModel(self.size, root, self.flat)

    def fork(self, index: int) -> None:
        """A private block has two owners then."""
        lease = self.lease(index)
        fork = Lease(*self.empty_path(lease.model.root), lease.trees)
        owned = lease.trees.native.fork(lease.native, fork.native)
        assert owned == lease.trees.model.fork(lease.model, fork.model)
        self.out.update(owned)
        self.leases.append(fork)

    def extend(self, index: int, kind: int, count: int) -> None:
        lease = self.lease(index)
        if lease.native.num_full_blocks < MAX_BLOCKS:
            unused = max(lease.model.ids, default=-1) + 1
            tokens = range(unused, unused + count) if self.flat else [kind] * count
            lease.native.extend(np.array(tokens, dtype=np.uint16))
            lease.model.extend(tokens)

    def set_extra(self, index: int, block: int, extra: bytes) -> None:
        lease = self.lease(index)
        both(
            lambda: lease.native.set_extra(block, extra),
            lambda: lease.model.set_extra(block, extra),
        )

    def name_blocks(self, index: int, start: int, stop: int) -> None:
        lease = self.lease(index)
        result = both(
            lambda: lease.native.hashes(start, stop), lambda: lease.model.hashes(start, stop)
        )
        assert result is None or result[0] == result[1]

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
            self.give(fresh)
        else:
            self.give([block for block in before if block != NONE])

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
        lease.trees.native.replace(lease.native, position, fresh[0])
        self.give(was_private)

    # -- matching

    def pin(self, index: int, limit: int) -> None:
        lease = self.lease(index)
        if not lease.native.num_held:
            lease.trees = self.trees
        self.same("pin", lease.trees, limit, lease=lease)

    def pin_without_a_use(self, index: int, limit: int, end: str) -> None:
        """A request is matched before it is known whether it has its blocks."""
        lease = self.lease(index)
        if lease.native.num_held:
            return
        lease.trees = self.trees
        if self.same("pin", lease.trees, limit, False, lease=lease) is None:
            return
        if end == "refused":
            assert self.same("release", lease.trees, lease=lease) == []
        else:
            firm = [node.firm for node in lease.model.nodes[: lease.model.num_committed]]
            REACHED["keep of a block that leaves before others"] += firm != sorted(firm)[::-1]
            self.same("keep", lease.trees, end == "granted", lease=lease)

    def peek(self, index: int, limit: int) -> None:
        self.same("peek", self.trees, limit, lease=Lease(*self.unheld(index), self.trees))
        self.same("referenced_run", self.trees, limit, lease=Lease(*self.unheld(index), self.trees))

    def probe(self, index: int, start: int, stop: int) -> None:
        self.same("probe", self.trees, start, stop, lease=Lease(*self.unheld(index), self.trees))

    def unheld(self, index: int) -> tuple[Path, PathModel]:
        """A fresh path with the tokens and extra keys of one we have."""
        model = self.lease(index).model
        native, twin = self.empty_path(model.root)
        for path in (native, twin):
            path.extend(model.ids)
            for block, extra in model.extras.items():
                path.set_extra(block, extra)
        return native, twin

    def trim(self, index: int, less: int) -> None:
        lease = self.lease(index)
        held = max(lease.native.num_held - less, 0)
        self.give(self.same("trim", lease.trees, held, lease=lease) or [])

    def retreat(self, index: int, less: int) -> None:
        """Blocks of a media item that is cached in part: they are no longer shared, and the path
        gets others to compute into."""
        lease = self.lease(index)
        blocks = max(min(lease.native.num_held, lease.native.num_committed) - less, 0)
        self.give(self.same("retreat", lease.trees, blocks, lease=lease) or [])

    def truncate(self, index: int, less: int, extra: bytes) -> None:
        """Rejected tokens, and blocks that were reserved for tokens, go. Other tokens at the same
        positions get other hashes."""
        lease = self.lease(index)
        tokens = max(lease.native.num_tokens - less, 0)
        self.give(self.same("truncate", lease.trees, tokens, extra, lease=lease) or [])

    def drop_leading(self, index: int, blocks: int) -> None:
        lease = self.lease(index)
        late = any(node.bits & LOADING for node in lease.model.nodes[:blocks])
        freed = self.same("drop_leading", lease.trees, blocks, lease=lease)
        REACHED["drop of a block that another path loads"] += late and freed is not None
        self.give(freed or [])

    def release(self, index: int, forget: bool) -> None:
        lease = self.lease(index)
        self.give(self.same("release", lease.trees, lease=lease) or [])
        if forget:
            self.leases.remove(lease)

    def mark_announced(self, index: int, start: int, less: int) -> None:
        lease = self.lease(index)
        upto = max(lease.native.num_held - less, 0)
        self.same("mark_announced", lease.trees, min(start, upto), upto, lease=lease)

    def worth_saving(self, index: int, start: int, less: int, min_hits: int) -> None:
        lease = self.lease(index)
        upto = max(lease.native.num_held - less, 0)
        self.same("worth_saving", lease.trees, min(start, upto), upto, min_hits, lease=lease)

    def whole_request(self, kinds: list[int], image: int) -> None:
        """Match, compute the rest, release: the source of most of the cache's contents."""
        index = len(self.leases)
        self.new_path(ROOTS[0], kinds, True, 0, image)
        self.commit(index, 0, True)
        self.release(index, forget=True)

    # -- requests that take one step

    def request_in_one_step(
        self,
        kinds: list[int],
        more: int,
        limit: int,
        least: int,
        free: int,
        evict: bool,
        other: bool,
        end: str,
    ) -> None:
        """A request that finds what is on the device only, from its match to its end."""
        index = len(self.leases)
        self.new_path(ROOTS[0], kinds, False, more, 0)
        self.pin_resident(index, limit, least, free, evict, other)
        lease = self.lease(index)
        self.provide(index, -(-lease.native.num_tokens // self.size))
        self.commit_tokens(index, 0, False)
        if end != "stays":
            self.end_in_one_step(index)
            self.release(index, forget=True)

    def pin_resident(
        self, index: int, limit: int, least: int, free: int, evict: bool, other: bool
    ) -> None:
        """A refused one changes nothing, which `alike` compares."""
        lease = self.lease(index)
        path = lease.model
        if not (lease.native.num_held or lease.native.num_blocks):
            lease.trees = self.trees
        root = ROOTS[path.root == ROOTS[0]] if other else path.root
        blocks = -(-path.num_tokens // self.size)
        run = self.same(
            "pin_resident", lease.trees, root, limit, least, blocks, free, evict, 0.0, lease=lease
        )
        if run is None:
            return
        REACHED[f"pin_resident {'grants' if run >= 0 else 'declines'}"] += 1
        if run < 0:
            return
        fresh = self.take(blocks - run)
        native, model = lease.native.complete(run, fresh), lease.model.complete(run, fresh)
        assert native == model == tuple(lease.native.blocks())

    def commit_tokens(self, index: int, less: int, known: bool) -> None:
        lease = self.lease(index)
        if not lease.native.num_held and not lease.native.num_blocks:
            lease.trees = self.trees
        tokens = lease.model.num_tokens - less
        done = self.same("commit_tokens", lease.trees, tokens, known, lease=lease)
        if done is not None:
            REACHED[f"commit_tokens {'commits' if done >= 0 else 'declines'}"] += 1

    def end_in_one_step(self, index: int) -> None:
        lease = self.lease(index)
        if not (lease.native.num_held or lease.native.num_blocks):
            lease.trees = self.trees
        native = lease.trees.native.end(lease.native, -1, 0.0)
        assert native == lease.trees.model.end(lease.model, -1, 0.0)
        REACHED[f"end {'declines' if native is None else 'answered'}"] += 1
        self.give(native or [])

    # -- committing and loading

    def commit(self, index: int, less: int, provide: bool) -> None:
        lease = self.lease(index)
        upto = max(lease.native.num_full_blocks - less, 0)
        if provide:
            self.provide(index, upto)
        if not lease.native.num_held and not lease.native.num_blocks:
            lease.trees = self.trees
        self.same("commit", lease.trees, upto, lease=lease)

    def begin_load(self, index: int, start: int, count: int, where: str, dropped: int) -> None:
        """dropped: the load is late, and the lease drops so many blocks before its end. Below 0: it
        waits for the load."""
        lease = self.lease(index)
        if not lease.native.num_held and not lease.native.num_blocks:
            lease.trees = self.trees
        start = {
            "held": lease.native.num_held,
            "committed": lease.native.num_committed,
            "any": start,
        }[where]
        stop = min(start + count, lease.native.num_full_blocks)
        self.provide(index, stop)
        if any(self.out[block] > 1 for block in lease.native.blocks()[start:stop]):
            return  # a fork has the block too, and no load writes it
        result = both(
            lambda: lease.trees.native.begin_load(lease.native, start, stop),
            lambda: lease.trees.model.begin_load(lease.model, start, stop),
        )
        REACHED[f"begin_load {'answered' if result else 'refused'}"] += 1
        if result is None:
            return
        assert result[0].shape == result[1].shape
        assert result[0].dtype == np.uint32
        if start < stop:
            self.loads.append(Flight(lease.trees, *result))
        if dropped >= 0:
            self.continue_without_loads(lease)
            self.drop_leading(index, dropped)

    def finish_load(self, number: int, good: int, full: bool) -> None:
        """A lost block stays with the first lease that has it. The others get a private one in its
        place."""
        load = self.loads.pop(number % len(self.loads))
        good = len(load.native) if full else min(good, len(load.native))
        lost, expected = (
            load.trees.native.finish_load(load.native, good),
            load.trees.model.finish_load(load.model, good),
        )
        assert lost == expected
        for block in lost:
            holders = [lease for lease in self.leases if self.shares(lease, block)]
            for lease in holders[1:]:
                self.swap_for_private(lease, lease.native.blocks().index(block))
            if not holders:
                self.give([block])
        for lease in self.leases:
            self.settle_lease(lease)

    def shares(self, lease: Lease, block: int) -> bool:
        table = lease.native.blocks()
        return block in table and lease.native.is_shared(table.index(block))

    def swap_for_private(self, lease: Lease, position: int) -> None:
        fresh = self.take(1)[0]
        lease.trees.native.replace(lease.native, position, fresh)
        lease.trees.model.replace(lease.model, position, fresh)

    def continue_without_loads(self, lease: Lease) -> None:
        blocks = zip(lease.model.nodes, [*lease.model.shared], strict=False)
        for position, (node, shared) in enumerate(blocks):
            if shared and node.bits & LOADING:
                self.swap_for_private(lease, position)

    def settle_lease(self, lease: Lease) -> None:
        stale = [
            position
            for position, node in enumerate(lease.model.nodes[: lease.model.num_blocks])
            if lease.model.shared[position] and node.block != lease.model.table[position]
        ]
        if stale:
            assert self.same("commit", lease.trees, stale[0] + 1, lease=lease) is None
        self.same("settle", lease.trees, lease=lease)

    # -- eviction and the host tier

    def evict(self, count: int, old: int, hashes: bool) -> None:
        trees = self.all_trees[old % len(self.all_trees)]
        native = trees.native.evict(count, hashes)
        model = trees.model.evict(count, hashes)
        assert native[1:5] == model[1:]
        assert len(native[0]) == len(model[0]) == len(native[3]) <= count
        if len(native[0]):
            self.offloads.append(Flight(trees, native[0], model[0]))

    def finish_offload(self, number: int, kept: int) -> None:
        flight = self.offloads.pop(number % len(self.offloads))
        on_host = bytes(kept >> j % 8 & 1 for j in range(len(flight.native)))
        native = flight.trees.native.finish_offload(flight.native, on_host)
        assert native == flight.trees.model.finish_offload(flight.model, on_host)
        assert len(native[0]) + len(native[1]) == len(flight.native)
        REACHED["evicted"] += bool(native[0])
        REACHED["eviction overtaken by a match"] += bool(native[1])
        self.give(native[0])

    def evict_at_once(self, count: int, kept: int) -> None:
        before = len(self.offloads)
        self.evict(count, 0, kept % 2 == 0)
        if len(self.offloads) > before:
            self.finish_offload(before, kept)

    def drop(self, count: int, old: int, hashes: bool) -> None:
        trees = self.all_trees[old % len(self.all_trees)]
        native = trees.native.drop(count, hashes)
        assert native == trees.model.drop(count, hashes)
        self.give(native[0])

    def hint(self, index: int, start: int, gained: bool, old: int) -> None:
        native, _ = self.unheld(index)
        start = start // 2
        keys = native.hashes(min(start, native.num_full_blocks), native.num_full_blocks)
        trees = self.all_trees[old % len(self.all_trees)]
        self.same("host_blocks_added" if gained else "host_blocks_removed", trees, keys)
        assert (
            both(
                lambda: trees.native.host_blocks_removed(b"short"),
                lambda: trees.model.host_blocks_removed(b"short"),
            )
            is None
        )

    def ask_for_hashes(self) -> None:
        """Every hash, those of blocks that no call has asked for before included."""
        self.compare_hashes()

    def compare_hashes(self) -> None:
        for lease in self.leases:
            held = lease.native.num_held
            assert lease.native.hashes(0, held) == lease.model.hashes(0, held)
        for trees in self.all_trees:
            assert sorted(split_hashes(trees.native.device_hashes())) == sorted(
                split_hashes(trees.model.device_hashes())
            )
            assert sorted(trees.native.paths()) == sorted(trees.model.paths())

    def clear_host(self, sure: int) -> None:
        if sure == 0:
            self.same("clear_host", self.trees)
            while not self.trees.native.sweep_host(1 + sure):
                pass

    def retire(self, sure: int) -> None:
        if sure != 0:
            return
        trees, self.trees = self.trees, self.new_trees()
        before = trees.native.statistics()
        waiting = [node for node in trees.model.nodes.values() if trees.model._evictable(node)]
        native, model = trees.native.retire(), trees.model.retire()
        assert native == model == before["evictable"] - sum(bool(node.readers) for node in waiting)
        assert trees.native.retired
        assert trees.model.retired
        self.all_trees = (
            [self.trees, *self.all_trees][:4]
            if not self.busy(self.all_trees[-1:])
            else [self.trees, *self.all_trees]
        )

    def busy(self, trees: list[Trees]) -> bool:
        return not all(one.native.idle for one in trees)

    def sweep(self, old: int, count: int) -> None:
        """Some blocks of a retired tree come back. Those with a reader or a user do not."""
        trees = self.all_trees[old % len(self.all_trees)]
        in_use = {
            block
            for lease in self.leases
            for position, block in enumerate(lease.native.blocks())
            if lease.trees is trees and lease.native.is_shared(position)
        }
        freed = self.same("sweep", trees, count)
        if freed is None:
            assert not trees.native.retired
            return
        assert not in_use & set(freed)
        self.give(freed)

    def dismantle(self, old: int) -> None:
        """The memory of a retired tree that nothing uses."""
        trees = self.all_trees[old % len(self.all_trees)]
        if not trees.native.idle:
            with pytest.raises(ValueError, match="although something uses it"):
                trees.native.dismantle()
            return
        REACHED["dismantle"] += 1
        while not trees.native.dismantle():
            trees.native.check()
        trees.model.nodes.clear()
        trees.model.roots.clear()

    def use_of_another_tree(self, index: int) -> None:
        """A path that holds nodes of one tree is refused by another in every call."""
        lease = self.lease(index)
        if lease.native.num_held:
            other = self.new_trees()
            for name, args in [
                ("trim", (0,)),
                ("release", ()),
                ("settle", ()),
                ("commit", (0,)),
                ("peek", ()),
                ("worth_saving", (0, 0, 0)),
                ("drop_leading", (0,)),
                ("pin_resident", (lease.model.root, -1, 0, 1, 1, False, 0.0)),
                ("commit_tokens", (0, True)),
                ("end", (-1, 0.0)),
            ]:
                assert self.same(name, other, *args, lease=lease) is None

    # -- after each step

    def alike(self) -> None:
        for lease in self.leases:
            native, model = lease.native, lease.model
            for name in (
                "num_tokens",
                "num_full_blocks",
                "num_held",
                "num_committed",
                "num_blocks",
            ):
                assert getattr(native, name) == getattr(model, name), name
            assert native.blocks() == model.blocks()
            assert [native.is_shared(i) for i in range(native.num_blocks)] == model.shared
            for block in range(MAX_BLOCKS + 1):
                assert native.extra_key(block) == model.extra_key(block)
            held = native.num_held
            assert native.tokens(0, held) == model.tokens(0, held)

        for trees in self.all_trees:
            trees.native.check()
            trees.model.check()
            native_counts, model_counts = trees.native.statistics(), trees.model.statistics()
            del native_counts["bytes"], model_counts["bytes"]
            assert native_counts == model_counts
            assert trees.native.returning == trees.model.returning
        if self.eager:
            self.compare_hashes()

    def teardown(self) -> None:
        """When everything has ended, every device block is free and nothing is left in any tree."""
        while self.loads:
            self.finish_load(0, 1, full=False)
        while self.leases:
            self.release(0, forget=True)
        while self.offloads:
            self.finish_offload(0, 1)
        for trees in self.all_trees:
            if not trees.native.retired:
                trees.native.retire()
            self.give(trees.native.sweep(100_000))
            assert trees.native.idle
            while not trees.native.dismantle():
                trees.native.check()
            trees.native.check()
            assert trees.native.statistics()["nodes"] == 0
        assert not self.out
