"""What a sink without a word for "everything is void" has been told, so that it can be taken
back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import FlushTask
from kvactors.types import split_keys


class Node:
    """A block. tokens: its own, or, where the path above is not known by name (`top`), everything
    from the root on. told: whether it counts as resident; if not, it is here for the sake of blocks
    below it."""

    __slots__ = ("children", "parent", "position", "tokens", "told", "top")

    def __init__(self, parent: bytes, position: int, tokens: bytes, *, top: bool) -> None:
        self.parent = parent
        self.position = position
        self.tokens = tokens
        self.top = top
        self.children = 0
        self.told = True


class TakeBack(NamedTuple):
    """A path to be told gone from `start` on. names: of the blocks concerned. tokens: complete,
    from the root on."""

    names: list[bytes]
    start: int
    tokens: bytes

    def __repr__(self) -> str:
        return discreet(self)


class Told:
    """Blocks by name. Whatever may have been told counts as told. Bounded by the blocks that are,
    and those above them."""

    def __init__(self, block_size: int) -> None:
        self.block_bytes = 4 * block_size
        self.nodes: dict[bytes, Node] = {}  # parents before children

    def holds(self, task: FlushTask) -> bool:
        """Whether every block of a task counts as told already."""
        return all(
            (node := self.nodes.get(key)) is not None and node.told for key in split_keys(task.keys)
        )

    def resident(self, task: FlushTask) -> None:
        """A task is about to say that blocks are resident."""
        self.add(task.parent, task.start_block_idx, split_keys(task.keys), task.tokens)

    def add(self, parent: bytes, start: int, keys: Sequence[bytes], tokens: bytes) -> None:
        """Blocks of a path, from position `start` on. tokens: the complete path."""
        for position, key in enumerate(keys, start):
            node = self.nodes.get(key)
            if node is None:
                above = self.nodes.get(parent)
                first = self.block_bytes * position if above is not None else 0
                end = self.block_bytes * (position + 1)
                self.nodes[key] = Node(parent, position, tokens[first:end], top=above is None)
                if above is not None:
                    above.children += 1
            else:
                node.told = True
            parent = key

    def gone(self, keys: Iterable[bytes]) -> None:
        """Blocks have been told gone."""
        for key in keys:
            node = self.nodes.get(key)
            if node is not None:
                node.told = False
                self._prune(key)

    def _prune(self, key: bytes) -> None:
        node = self.nodes.get(key)
        while node is not None and not node.told and not node.children:
            del self.nodes[key]
            key = node.parent
            node = None if node.top else self.nodes[key]
            if node is not None:
                node.children -= 1

    def take_back(self) -> Iterator[TakeBack]:
        """Paths that take everything back, the deepest first; each block is in one of them."""
        leaves = [key for key, node in self.nodes.items() if not node.children]
        leaves.sort(key=lambda key: -self.nodes[key].position)
        seen: set[bytes] = set()
        for leaf in leaves:
            chain = self._chain(leaf)
            fresh = next(i for i, key in enumerate(chain) if key not in seen)
            first = next(i for i in range(fresh, len(chain)) if self.nodes[chain[i]].told)
            seen.update(chain)
            tokens = b"".join(self.nodes[key].tokens for key in chain)
            yield TakeBack(chain[first:], self.nodes[chain[first]].position, tokens)

    def _chain(self, key: bytes) -> list[bytes]:
        chain = [key]
        while not self.nodes[key].top:
            key = self.nodes[key].parent
            chain.append(key)
        chain.reverse()
        return chain

    def path_tokens(self, key: bytes) -> bytes:
        """The complete path to a block."""
        return b"".join(self.nodes[one].tokens for one in self._chain(key))

    def __len__(self) -> int:
        return len(self.nodes)
