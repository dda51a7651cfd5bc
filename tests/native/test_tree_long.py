"""Long chains against a model in plain Python: matches, references, the order of eviction.

The tree's model test has paths of at most six blocks. A match, a use and a release handle nodes of
a chain together, over groups of nodes and chunks of memory, and with runs that end within them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvactors.native import DEVICE, HOST, BlockTree, Path
from tests.native.test_tree_chains import ROOT

Block = tuple[int, ...]
"""A block by the tokens up to its end."""


@dataclass
class Node:
    block: int | None = None
    refs: int = 0
    host: bool = False
    offloading: bool = False


@dataclass
class Model:
    """Nodes, and those that can be evicted, least recently used first."""

    nodes: dict[Block, Node] = field(default_factory=dict)
    children: Counter[Block] = field(default_factory=Counter)
    order: list[Block] = field(default_factory=list)

    def pin(self, blocks: list[Block]) -> tuple[list[int], bytes]:
        """The device blocks of the run, and the states of the nodes beyond it."""
        run: list[int] = []
        states = b""
        for block in blocks:
            node = self.nodes.get(block)
            if node is None:
                break
            node.refs += 1
            if not states and node.block is not None:
                run.append(node.block)
                node.offloading = False
            else:
                states += bytes([HOST * node.host | DEVICE * (node.block is not None)])
        used = set(blocks)
        self.order = [block for block in self.order if block not in used]
        return run, states

    def commit(self, blocks: list[Block], table: list[int]) -> None:
        for block, number in zip(blocks, table, strict=True):
            if block not in self.nodes:
                self.nodes[block] = Node()
                self.children[block[:-1]] += 1
            if self.nodes[block].block is None:
                self.nodes[block].block = number

    def hold_new(self, blocks: list[Block], found: int) -> None:
        for block in blocks[found:]:
            self.nodes[block].refs += 1

    def release(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            node = self.nodes[block]
            node.refs -= 1
            if node.refs == 0:
                self.order.append(block)

    def evict(self, count: int) -> list[Block]:
        taken, self.order = self.order[:count], self.order[count:]
        for block in taken:
            self.nodes[block].offloading = True
        return taken

    def finish(self, taken: list[Block], on_host: bytes) -> list[int]:
        freed = []
        for block, kept in zip(taken, on_host, strict=True):
            node = self.nodes[block]
            node.host = node.host or bool(kept)
            if node.offloading and node.block is not None:
                freed.append(node.block)
                node.block, node.offloading = None, False
        for block in sorted(taken, key=len, reverse=True):
            node = self.nodes[block]
            if node.block is None and not (node.host or node.refs or self.children[block]):
                del self.nodes[block]
                self.children[block[:-1]] -= 1
        return freed


class Pair:
    """The tree and the model, compared after each call."""

    def __init__(self, capacity: int) -> None:
        self.tree, self.model = BlockTree(1, capacity), Model()
        self.numbers = iter(range(1 << 30))
        self.held: list[tuple[Path, list[Block]]] = []

    def serve(self, tokens: list[int], *, hold: bool) -> None:
        """Match a prompt, compute the rest of it, share it, and keep or release it."""
        blocks = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        path = Path(1, ROOT)
        path.extend(tokens)
        seen = self.tree.peek(path)
        run, states = self.model.pin(blocks)
        found = len(run) + len(states)
        assert seen == self.tree.pin(path) == (len(run), states)
        assert list(path.blocks()) == [*run, *[-1] * len(states)]
        fresh = [next(self.numbers) for _ in blocks[len(run) :]]
        path.assign(len(run), fresh)
        self.tree.commit(path, len(blocks))
        self.model.commit(blocks, [*run, *fresh])
        self.model.hold_new(blocks, found)
        self.held.append((path, blocks))
        if not hold:
            self.release(-1)

    def release(self, which: int) -> None:
        path, blocks = self.held.pop(which)
        assert self.tree.release(path) == []
        self.model.release(blocks)

    def evict(self, count: int, *, again: list[int]) -> None:
        """Evict, serve a prompt while the offload is in flight, end it."""
        expected = [self.model.nodes[block].block for block in self.model.order[:count]]
        taken = self.model.evict(count)
        nodes, _, _, blocks, _ = self.tree.evict(count)
        assert list(blocks) == expected
        if again:
            self.serve(again, hold=False)
        on_host = bytes(block[-1] % 3 != 0 for block in taken)
        freed, kept = self.tree.finish_offload(nodes, on_host)
        assert freed == self.model.finish(taken, on_host)
        assert len(freed) + len(kept) == len(taken)

    def compare(self) -> None:
        found, nodes = self.tree.statistics(), self.model.nodes.values()
        assert found["nodes"] == len(nodes)
        assert found["device"] == sum(node.block is not None for node in nodes)
        assert found["referenced"] == sum(node.refs != 0 for node in nodes)
        assert found["evictable"] == len(self.model.order)
        assert found["offloading"] == 0
        self.tree.check()


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 3), st.integers(0, 24))


def prompt(draw: tuple[int, int, int, int]) -> list[int]:
    """The beginning of one of three chains, and a branch of it."""
    chain, length, branch, more = draw
    return [*range(1000 * chain, 1000 * chain + length), *range(100 * branch, 100 * branch + more)]


CALLS = st.one_of(
    st.tuples(st.just("serve"), PROMPTS),
    st.tuples(st.just("hold"), PROMPTS),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.tuples(st.integers(1, 64), st.none() | PROMPTS)),
)


@given(st.lists(CALLS, max_size=25))
def test_long_chains_are_as_in_the_model(calls: list[tuple[str, object]]) -> None:
    pair = Pair(64)
    for name, argument in calls:
        if name in ("serve", "hold"):
            pair.serve(prompt(argument), hold=name == "hold")  # type: ignore[arg-type]
        elif name == "release":
            if pair.held:
                pair.release(argument % len(pair.held))  # type: ignore[operator]
        else:
            count, again = argument  # type: ignore[misc]
            pair.evict(count, again=prompt(again) if again else [])
        pair.compare()


def test_a_chain_over_the_chunks_of_the_tree_is_as_in_the_model() -> None:
    """A tree without a capacity has 256 nodes in a chunk."""
    pair, tokens = Pair(0), list(range(530))
    pair.serve(tokens, hold=False)
    for kept in (513, 512, 511, 256, 255, 9, 8, 7, 1):
        pair.evict(len(pair.model.order) - kept, again=[])
        pair.compare()
        pair.serve(tokens[:520], hold=True)
        pair.serve(tokens, hold=False)
        pair.release(0)
        pair.compare()
