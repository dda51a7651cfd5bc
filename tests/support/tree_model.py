"""The block tree in plain Python: what `kvactors.native.BlockTree` must do, written for reading
rather than speed.

Property tests run both side by side and compare every result. Methods, arguments, results and
errors are those described in `kvactors/_native.pyi`. Node ids are the model's own: the native
tree's are different.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvactors.native import DEVICE, HASH_BYTES, HOST, LOADING, OFFLOADING
from kvactors.types import split_hashes
from tests.support.path_model import NONE, Node, PathModel, block_name, packed, require


class TreeModel:
    """Twin of `BlockTree`. Everything is found by walking or searching, without counters or lists
    kept ahead of need."""

    def __init__(self, block_size: int, capacity: int = 0) -> None:
        require(1 <= block_size <= 2**24, "block_size must be between 1 and 2**24")
        require(0 <= capacity < 2**32, "capacity out of range")
        self.block_size = block_size
        self.retired = False
        self.roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self._next_id = 0
        self._clock = 0

    # -- matching

    def pin(self, path: PathModel, max_blocks: int = -1, used: bool = True) -> tuple[int, bytes]:
        """Match, reference the known blocks, fill the table."""
        self._own(path)
        require(not (path.num_held or path.num_blocks), "the path holds nodes or device blocks")
        more = self._walk(path, max_blocks)
        run = next((i for i, node in enumerate(more) if not node.bits & DEVICE), len(more))
        states = bytes(node.bits for node in more[run:])
        path.nodes += more
        path.name_to(len(path.nodes))
        path.tree = self if path.nodes else path.tree
        for position, node in enumerate(more):
            node.refs += 1
            node.hits += used
            if used and position < run:
                node.bits &= ~OFFLOADING
            usable = position < run or bool(node.bits & LOADING)
            path.table.append(node.block if usable else NONE)
            path.shared.append(usable)
        path.num_committed += run
        return run, states

    def pin_resident(
        self,
        path: PathModel,
        root: bytes,
        max_blocks: int,
        least: int,
        blocks: int,
        free: int,
        evict: bool,
        now: float,
    ) -> int:
        """`pin`, if that and some free blocks, or evictable ones, are all that a request needs."""
        del now
        self._own(path)
        known = self._walk(path, max_blocks)
        if evict and free < blocks - len(known):
            free += sum(map(self._evictable, self.nodes.values()))
            free -= sum(map(self._evictable, known))
        resident = all(node.bits & DEVICE for node in known)
        run = len(known)
        empty = not path.num_held and not path.num_blocks and path.root == root
        if not (empty and resident and least <= run <= blocks <= run + free):
            return -1
        self.pin(path, max_blocks)
        return run

    def keep(self, path: PathModel, used: bool = True) -> None:
        """Use what was pinned without a use."""
        self._own(path)
        for node in path.nodes[: path.num_committed]:
            node.bits &= ~OFFLOADING
        for node in path.nodes:
            node.hits += used

    def peek(self, path: PathModel, max_blocks: int = -1) -> tuple[int, bytes]:
        """Match without changing anything."""
        self._own(path)
        found = self._walk(path, max_blocks)
        run = next((i for i, node in enumerate(found) if not node.bits & DEVICE), len(found))
        return run, bytes(node.bits for node in found[run:])

    def referenced_run(self, path: PathModel, max_blocks: int = -1) -> int:
        """Leading resident blocks that a path references."""
        self._own(path)
        found = self._walk(path, max_blocks)
        free = (i for i, node in enumerate(found) if not node.bits & DEVICE or not node.refs)
        return next(free, len(found))

    def trim(self, path: PathModel, held: int) -> list[int]:
        """Give back references beyond `held`."""
        self._own(path)
        require(
            path.num_committed <= held <= path.num_held,
            "cannot trim below the committed blocks or beyond the held",
        )
        for position in range(held, min(path.num_held, path.num_blocks)):
            if path.shared[position]:
                path.table[position], path.shared[position] = NONE, False
        dropped, path.nodes = path.nodes[held:], path.nodes[:held]
        return self._let_go(dropped)

    def retreat(self, path: PathModel, blocks: int) -> list[int]:
        """Give back references beyond `blocks`, committed ones included."""
        self._own(path)
        path.num_committed = min(path.num_committed, blocks)
        return self.trim(path, blocks)

    def truncate(self, path: PathModel, num_tokens: int, extra: bytes = b"") -> list[int]:
        """Give back what only the tokens beyond `num_tokens` need."""
        self._own(path)
        require(0 <= num_tokens <= path.num_tokens, "the path has fewer tokens")
        full, rest = divmod(num_tokens, self.block_size)
        require(path.num_committed <= full, "below the committed blocks")
        require(bool(rest) or not extra, "an extra key needs a block")
        shared = zip(path.shared[full:], path.nodes[full:], strict=False)
        require(not any(one and node.bits & LOADING for one, node in shared), "being loaded")
        require(not (rest and any(path.shared[full : full + 1])), "within a shared block")
        dropped, path.nodes = path.nodes[full:], path.nodes[:full]
        freed = self._let_go(dropped)
        blocks = full + bool(rest)
        rest_of = zip(path.table[blocks:], path.shared[blocks:], strict=True)
        freed += [block for block, one in rest_of if block != NONE and not one]
        path.table, path.shared = path.table[:blocks], path.shared[:blocks]
        path.cut(num_tokens, extra)
        return freed

    def drop_leading(self, path: PathModel, blocks: int) -> list[int]:
        """Give back the first blocks of a flat path, the first one first."""
        self._own(path)
        require(
            path.flat and not any(path.extras.values()), "the path is not flat, or has extra keys"
        )
        require(0 <= blocks <= min(path.num_full_blocks, path.num_blocks), "blocks out of range")
        shared = zip(path.shared[:blocks], path.nodes, strict=False)
        require(not any(one and node.bits & LOADING for one, node in shared), "being loaded")
        freed = []
        for position in range(blocks):
            private = not path.shared[position] and path.table[position] != NONE
            freed += [path.table[position]] if private else []
            freed += self._let_go(path.nodes[position : position + 1])
        path.drop_leading(blocks)
        return freed

    def probe(self, path: PathModel, start: int, stop: int) -> bytes:
        """The state of each block of a flat path."""
        self._own(path)
        require(path.flat and 0 <= start <= stop <= path.num_full_blocks, "blocks out of range")
        known = [self._below(path, position, None) for position in range(start, stop)]
        return bytes(0 if node is None else node.bits for node in known)

    def fork(self, path: PathModel, fork: PathModel) -> list[int]:
        """A second path of the same blocks. Returns those that have two owners now."""
        self._own(path)
        require(path.flat == fork.flat and not fork.num_tokens, "the fork is no empty path")
        blocks = min(path.num_blocks, path.num_full_blocks)
        fork.ids, fork.extras, fork.names = [*path.ids], {**path.extras}, [*path.names]
        fork.nodes, fork.table = [*path.nodes], path.table[:blocks]
        fork.shared, fork.num_committed = path.shared[:blocks], path.num_committed
        fork.tree = path.tree
        for node in fork.nodes:
            node.refs += 1
        owned = zip(fork.table, fork.shared, strict=True)
        return [block for block, one in owned if block != NONE and not one]

    def release(self, path: PathModel) -> list[int]:
        """Give back everything."""
        self._own(path)
        freed = [
            path.table[i]
            for i in range(path.num_blocks)
            if not path.shared[i] and path.table[i] != NONE
        ]
        freed += self._let_go(path.nodes)
        path.nodes, path.table, path.shared = [], [], []
        path.num_committed, path.tree = 0, None
        return freed

    def end(self, path: PathModel, output_tokens: int, now: float) -> list[int] | None:
        """`release`, in a tree that is not retired."""
        del output_tokens, now
        self._own(path)
        return None if self.retired else self.release(path)

    def mark_announced(self, path: PathModel, start: int, stop: int) -> int:
        """Mark nodes. Returns the first that was not marked."""
        self._own(path)
        require(stop <= path.num_held, "beyond the nodes this path holds")
        first = next((i for i in range(start, stop) if not path.nodes[i].announced), stop)
        for node in path.nodes[start:stop]:
            node.announced = True
        return first

    def worth_saving(self, path: PathModel, start: int, stop: int, min_hits: int) -> list[int]:
        """Positions whose blocks were used often enough."""
        self._own(path)
        require(stop <= path.num_held, "beyond the nodes this path holds")
        return [i for i in range(start, stop) if path.nodes[i].hits >= min_hits]

    # -- committing

    def commit(self, path: PathModel, upto: int) -> tuple[int, int, list[int]]:
        """Make computed blocks shareable."""
        self._own(path)
        require(upto <= path.num_full_blocks, "commit beyond the full blocks of the path")
        start = path.num_committed
        for position in range(start, upto):
            require(
                position < path.num_blocks and path.table[position] != NONE,
                "commit without a device block",
            )
            stale = path.shared[position] and path.nodes[position].block != path.table[position]
            require(not stale, "commit of a position whose load has failed and was not settled")
        adopted: list[int] = []
        for position in range(start, start if self.retired else upto):
            node = self._known(path, position)
            if node is not None and node.bits & LOADING:
                break
            if node is None or position == path.num_held:
                node = self._hold(path, position)
            if node.bits & DEVICE:
                node.bits &= ~OFFLOADING
            else:
                adopted += [position] if node.bits & HOST else []
                node.take_device(path.table[position])
                path.shared[position] = True
            path.num_committed = position + 1
        return start, path.num_committed, adopted

    def commit_tokens(self, path: PathModel, tokens: int, known: bool) -> int:
        """`commit` of the blocks of so many tokens, if nothing else comes of it."""
        self._own(path)
        upto = tokens // self.block_size
        if not 0 <= tokens <= min(path.num_tokens, path.num_blocks * self.block_size):
            return -1
        if upto > path.num_committed:
            if known or self.retired or self.statistics()["host"]:
                return -1
            self.commit(path, upto)
        return path.num_committed

    def settle(self, path: PathModel) -> int:
        """Count loaded blocks as committed and make the lost ones private."""
        self._own(path)
        while path.num_committed < min(path.num_held, path.num_blocks):
            node = path.nodes[path.num_committed]
            if not node.firm or node.block != path.table[path.num_committed]:
                break
            path.num_committed += 1
        for position in range(path.num_committed, path.num_blocks):
            if path.shared[position] and path.nodes[position].block != path.table[position]:
                path.shared[position] = False
        return path.num_committed

    def replace(self, path: PathModel, position: int, block: int) -> None:
        """Another private block, or none, at a position that is not committed."""
        self._own(path)
        require(
            path.num_committed <= position < path.num_blocks,
            "cannot replace a committed block or one beyond the table",
        )
        require(NONE <= block < 2**32 - 1, "device block id out of range")
        path.table[position], path.shared[position] = block, False

    # -- loading

    def begin_load(self, path: PathModel, start: int, stop: int) -> NDArray[np.uint32]:
        """Mark blocks as loading into the path's private blocks."""
        self._own(path)
        require(start <= path.num_held, "beyond the nodes this path holds")
        require(not self.retired, "the tree is retired: nothing can be loaded into it")
        require(
            start <= stop <= min(path.num_full_blocks, path.num_blocks),
            "load beyond the path's blocks",
        )
        private = all(not path.shared[i] and path.table[i] != NONE for i in range(start, stop))
        require(private, "load into a position without a private device block")
        known = [self._known(path, position) for position in range(start, stop)]
        busy = any(node is not None and node.bits & (DEVICE | LOADING) for node in known)
        require(not busy, "load of a block that is on the device or loading already")
        for position in range(path.num_held, stop):
            self._hold(path, position)
        for position in range(start, stop):
            path.nodes[position].bits |= LOADING
            path.nodes[position].block = path.table[position]
            path.shared[position] = True
        return self._ids(path.nodes[start:stop])

    def finish_load(self, nodes: NDArray[np.uint32], good: int) -> list[int]:
        """The end of a load."""
        require(good <= len(nodes), "more good blocks than the load has")
        batch = self._in_flight(nodes, LOADING)
        lost = []
        for index, node in enumerate(batch):
            assert node.parent is not None
            node.bits &= ~LOADING
            if index < good and node.parent.firm and (node.refs or not self.retired):
                node.take_device(node.block)
            else:
                lost.append(node.block)
                node.block = NONE
        for node in filter(self._evictable, reversed(batch)):
            self._use(node, *node.ancestors())  # a use of a block is one of all above it
        for node in batch:
            self._reap(node)
        return lost

    # -- eviction and the host tier

    def evict(
        self, count: int, hashes: bool = True
    ) -> tuple[NDArray[np.uint32], bytes, bytes, list[int], bytes]:
        """Pick the least recently used."""
        require(count >= 0, "count out of range")
        candidates = [node for node in self.nodes.values() if self._evictable(node)]
        picked = sorted(candidates, key=lambda node: node.used)[:count]
        parents = []
        for node in picked:
            assert node.parent is not None
            node.bits |= OFFLOADING
            node.readers += 1
            parents.append(node.parent.name)
        keys = b"".join(node.name for node in picked)
        blocks = [node.block for node in picked]
        return (
            self._ids(picked),
            keys if hashes else b"",
            b"".join(parents) if hashes else b"",
            blocks,
            bytes(node.bits for node in picked),
        )

    def drop(self, count: int, hashes: bool = True) -> tuple[list[int], int, bytes, bytes]:
        """Evict without a copy."""
        nodes, keys, _, _, states = self.evict(count, hashes)
        on_host = bytes(state & HOST for state in states)
        freed, kept = self.finish_offload(nodes, on_host)
        gone = [j for j in range(len(keys) // 32) if j not in kept]
        named = [
            [keys[32 * j :][:32] for j in gone if bool(on_host[j]) is it] for it in (True, False)
        ]
        return freed, len(freed), b"".join(named[0]), b"".join(named[1])

    def finish_offload(
        self, nodes: NDArray[np.uint32], on_host: bytes
    ) -> tuple[list[int], list[int]]:
        """The end of an eviction. A block is free when the last copy that reads it has ended."""
        require(len(on_host) == len(nodes), "on_host must hold one byte for each node")
        batch = self._in_flight(nodes, DEVICE)
        require(all(node.readers for node in batch), "finish of an offload that is not in flight")
        freed, kept = [], []
        for index, node in enumerate(batch):
            node.readers -= 1
            node.bits |= HOST if on_host[index] else 0
            abandoned = self.retired and not node.refs
            if node.readers or not (node.bits & OFFLOADING or abandoned):
                kept.append(index)
                continue
            freed.append(node.lose_device())
            self._reap(node)
        return freed, kept

    def host_blocks_added(self, keys: bytes) -> int:
        """Note that the host tier holds some blocks."""
        known = self._named(keys)
        for node in known:
            node.bits |= HOST
        return len(known)

    def host_blocks_removed(self, keys: bytes) -> int:
        """Hear that it no longer does."""
        known = self._named(keys)
        for node in known:
            node.bits &= ~HOST
            self._reap(node)
        return len(known)

    def clear_host(self) -> None:
        """Hear that it holds nothing."""
        for node in self.nodes.values():
            node.bits &= ~HOST
        self._reap_all()

    def retire(self) -> int:
        """Nothing matches any more. Returns how many device blocks are unused."""
        self.retired = True
        return self.returning

    @property
    def returning(self) -> int:
        """Device blocks of a retired tree that `sweep` has still to return."""
        return len(self._unused()) if self.retired else 0

    def sweep(self, count: int) -> list[int]:
        """Take unused device blocks from a retired tree, in the order in which they would
        have been evicted."""
        require(self.retired, "sweep of a tree that is in use")
        picked = sorted(self._unused(), key=lambda node: node.used)[:count]
        return [node.lose_device() for node in picked]

    def _unused(self) -> list[Node]:
        return [
            node for node in self.nodes.values() if node.firm and not node.refs and not node.readers
        ]

    # -- inspection

    def device_hashes(self) -> bytes:
        """Names of all resident nodes, in no particular order."""
        return b"".join(node.name for node in self.nodes.values() if node.bits & DEVICE)

    def paths(self) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """Root key, tokens, keys and states of every leaf, in no particular order."""
        result = []
        for leaf in self.nodes.values():
            if leaf.children:
                continue
            chain = [leaf, *leaf.ancestors()][::-1]
            tokens = b"".join(packed(node.tokens) for node in chain)
            assert chain[0].parent is not None
            states = bytes(node.bits for node in chain)
            result.append(
                (chain[0].parent.name, tokens, b"".join(node.name for node in chain), states)
            )
        return result

    def statistics(self) -> dict[str, int]:
        """Counts of nodes. `bytes` is the size of their tokens, since the native tree's own size
        means nothing here."""
        nodes = list(self.nodes.values())
        return {
            "nodes": len(nodes),
            "device": sum(bool(node.bits & DEVICE) for node in nodes),
            "host": sum(bool(node.bits & HOST) for node in nodes),
            "evictable": sum(self._evictable(node) for node in nodes),
            "referenced": sum(node.refs > 0 for node in nodes),
            "loading": sum(bool(node.bits & LOADING) for node in nodes),
            "offloading": sum(bool(node.bits & OFFLOADING) for node in nodes),
            "bytes": 4 * self.block_size * len(nodes),
        }

    def check(self) -> None:
        """RuntimeError if the model contradicts itself."""
        for node in self.nodes.values():
            parent = node.parent
            assert parent is not None
            held_up = parent.parent is None or (
                parent.id in self.nodes and (parent.refs or not node.refs)
            )
            in_place = (
                (node.wanted or self.retired)
                and parent.children.get((node.tokens, node.extra)) is node
                and held_up
            )
            named = node.name == block_name(parent.name, node.tokens, node.extra)
            placed = (node.block != NONE) == bool(node.bits & (DEVICE | LOADING))
            unordered = (
                parent.parent is not None
                and self._evictable(node)
                and self._evictable(parent)
                and parent.used < node.used
            )
            reachable = self.retired or not node.firm or parent.firm
            if not (in_place and named and placed and reachable) or unordered:
                raise RuntimeError(f"node {node.id} contradicts the rules")

    # -- inside

    def _own(self, path: PathModel) -> None:
        require(path.block_size == self.block_size, "path and tree differ in block size")
        require(not path.nodes or path.tree is self, "path holds nodes of another tree")

    def _walk(self, path: PathModel, max_blocks: int) -> list[Node]:
        limit = path.num_full_blocks if max_blocks < 0 else min(max_blocks, path.num_full_blocks)
        found: list[Node] = []
        while not self.retired and len(found) < limit:
            node = self._below(path, len(found), found[-1] if found else None)
            if node is None:
                break
            found.append(node)
        return found

    def _below(self, path: PathModel, position: int, before: Node | None) -> Node | None:
        """The node of a position, below that of the position before it, or below the root."""
        above = self.roots.get(path.root) if before is None or path.flat else before
        return None if above is None else above.children.get(path.identity(position))

    def _known(self, path: PathModel, position: int) -> Node | None:
        """The node of a position, held by the path or not."""
        if position < path.num_held:
            return path.nodes[position]
        if path.flat:
            return self._below(path, position, None)
        found = self._walk(path, position + 1)
        return found[position] if position < len(found) else None

    def _hold(self, path: PathModel, position: int) -> Node:
        """Reference the node of the first position beyond those held. Create it if need be."""
        path.tree = self
        path.name_to(position + 1)
        parent = (
            path.nodes[-1]
            if path.nodes and not path.flat
            else self.roots.setdefault(path.root, Node(NONE, path.root, None))
        )
        node = parent.children.get(path.identity(position))
        if node is None:
            tokens, extra = path.identity(position)
            node = Node(self._next_id, path.names[position], parent, tokens, extra)
            self._next_id += 1
            self.nodes[node.id] = parent.children[tokens, extra] = node
        node.refs += 1
        path.nodes.append(node)
        return node

    def _let_go(self, nodes: list[Node]) -> list[int]:
        """Drop one reference of each, the last one first."""
        freed = []
        for node in reversed(nodes):
            node.refs -= 1
            if node.refs:
                continue
            self._use(node)
            if self.retired and not node.readers and node.bits & DEVICE:
                freed.append(node.lose_device())
            self._reap(node)
        return freed

    def _use(self, *nodes: Node) -> None:
        """Among unreferenced blocks, the order of their uses is that of evictions."""
        for node in nodes:
            self._clock += 1
            node.used = self._clock

    def _evictable(self, node: Node) -> bool:
        return node.firm and not node.refs and not self.retired

    def _reap(self, node: Node) -> None:
        """Remove the node if nothing keeps it, then its parent if that was all that kept it."""
        if self.retired:
            return  # no search finds it: it is freed with the tree
        while node.parent is not None and not node.wanted and node.id in self.nodes:
            del self.nodes[node.id]
            del node.parent.children[node.tokens, node.extra]
            node = node.parent
        if node.parent is None and not node.children:
            self.roots.pop(node.name, None)

    def _reap_all(self) -> None:
        for node in list(self.nodes.values()):
            self._reap(node)

    def _in_flight(self, nodes: NDArray[np.uint32], bit: int) -> list[Node]:
        batch = [self.nodes.get(int(node)) for node in nodes]
        flying = [node for node in batch if node is not None and node.bits & bit]
        require(len(flying) == len(batch), "finish of an operation that is not in flight")
        return flying

    def _named(self, keys: bytes) -> list[Node]:
        require(len(keys) % HASH_BYTES == 0, "keys must be a multiple of 32 bytes")
        by_name = {node.name: node for node in self.nodes.values()}
        return (
            [] if self.retired else [by_name[key] for key in split_hashes(keys) if key in by_name]
        )

    @staticmethod
    def _ids(nodes: list[Node]) -> NDArray[np.uint32]:
        return np.array([node.id for node in nodes], dtype=np.uint32)
