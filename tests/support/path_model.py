"""A request's path and the tree's nodes in plain Python: the twin of `kvactors.native.Path`. See
`tree_model` for its use."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvactors.native import DEVICE, HASH_BYTES, OFFLOADING

NONE = -1
"""No device block."""


def require(holds: bool, message: str) -> None:
    """ValueError unless it holds."""
    if not holds:
        raise ValueError(message)


def token_list(tokens: Any) -> list[int]:
    """The ids of a sequence or buffer. TypeError for what is no integer, ValueError for what does
    not fit 32 bits."""
    if isinstance(tokens, str):
        raise TypeError("tokens must be integers")
    try:
        items = memoryview(tokens).tolist()
    except TypeError:
        items = list(tokens)
    if any(isinstance(item, bool) for item in items):
        raise TypeError("tokens must be integers, not bool")
    ids = [operator.index(item) for item in items]
    require(all(0 <= token < 2**32 for token in ids), "token ids must be between 0 and 2**32 - 1")
    return ids


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def block_name(parent: bytes, tokens: Sequence[int], extra: bytes) -> bytes:
    """The name of a block: SHA-256 over parent key, length of the extra key (uint32 LE), extra key,
    tokens (uint32 LE)."""
    return hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + packed(tokens)).digest()


@dataclass(eq=False)
class Node:
    """A block known to the tree. A root has no parent, and `name` is its root key."""

    id: int
    name: bytes
    parent: Node | None
    tokens: tuple[int, ...] = ()
    extra: bytes = b""
    children: dict[tuple[tuple[int, ...], bytes], Node] = field(default_factory=dict)
    bits: int = 0
    block: int = NONE
    refs: int = 0
    hits: int = 1
    used: int = 0  # its turn among those released, or loaded without a waiting lease
    readers: int = 0  # evictions whose copy of `block` may still run
    announced: bool = False

    @property
    def firm(self) -> bool:
        """Resident on the device and staying there. Nothing is below a root, so that a root is as
        firm as can be."""
        return self.parent is None or (self.bits & (DEVICE | OFFLOADING)) == DEVICE

    @property
    def wanted(self) -> bool:
        """Whether anything keeps the node in the tree."""
        return bool(self.bits or self.refs or self.children)

    def ancestors(self) -> Iterator[Node]:
        """From the parent up, without the root."""
        at = self.parent
        while at is not None and at.parent is not None:
            yield at
            at = at.parent

    def take_device(self, block: int) -> None:
        """Become resident in a device block. Announcements of an earlier one no longer count."""
        self.bits |= DEVICE
        self.block = block
        self.announced = False

    def lose_device(self) -> int:
        """Leave the device. Returns the block that is free now."""
        block, self.block = self.block, NONE
        self.bits &= ~(DEVICE | OFFLOADING)
        return block


class PathModel:
    """Twin of `Path`."""

    def __init__(self, block_size: int, root: bytes, flat: bool = False) -> None:
        require(1 <= block_size <= 2**24, "block_size must be between 1 and 2**24")
        require(len(root) == HASH_BYTES, "root must be 32 bytes")
        self.block_size = block_size
        self.root = root
        self.flat = flat
        self.ids: list[int] = []
        self.extras: dict[int, bytes] = {}
        self.names: list[bytes] = []
        self.nodes: list[Node] = []
        self.table: list[int] = []
        self.shared: list[bool] = []
        self.num_committed = 0
        self.tree: object = None  # the tree of the nodes

    @property
    def num_tokens(self) -> int:
        """Tokens of the path."""
        return len(self.ids)

    @property
    def num_full_blocks(self) -> int:
        """Blocks that have all their tokens."""
        return len(self.ids) // self.block_size

    @property
    def num_plain_blocks(self) -> int:
        """Leading full blocks without an extra key in their path."""
        return min(
            [self.num_full_blocks, *(block for block, extra in self.extras.items() if extra)]
        )

    @property
    def num_held(self) -> int:
        """Nodes referenced by this path."""
        return len(self.nodes)

    @property
    def num_blocks(self) -> int:
        """Entries of the block table."""
        return len(self.table)

    def extend(self, tokens: Any) -> None:
        """Append tokens, all or none."""
        self.ids += token_list(tokens)

    def set_extra(self, block: int, extra: bytes) -> None:
        """Extra identity of a block that has no name yet."""
        require(block >= len(self.names), "extra key for a block that already has a name")
        self.extras[block] = extra

    def extra_key(self, block: int) -> bytes:
        """Extra key of a block, empty for none."""
        return self.extras.get(block, b"")

    def cut(self, num_tokens: int, extra: bytes) -> None:
        """Keep the first tokens. Extra keys of incomplete blocks are replaced by `extra`."""
        self.ids = self.ids[:num_tokens]
        full = self.num_full_blocks
        self.names = self.names[:full]
        self.extras = {block: one for block, one in self.extras.items() if block < full}
        if extra:
            self.extras[full] = extra

    def drop_leading(self, blocks: int) -> None:
        """The blocks after the first ones take their positions."""
        del self.ids[: blocks * self.block_size]
        for column in (self.names, self.nodes, self.table, self.shared):
            del column[:blocks]
        self.num_committed = max(0, self.num_committed - blocks)

    def extra_keys(self, start: int, stop: int) -> tuple[tuple[int, bytes], ...]:
        """(position, extra key) of the blocks [start, stop) that have one."""
        require(0 <= start <= stop <= self.num_full_blocks, "blocks out of range")
        return tuple(
            sorted(
                (block, extra)
                for block, extra in self.extras.items()
                if extra and start <= block < stop
            )
        )

    def block_tokens(self, block: int) -> tuple[int, ...]:
        """Tokens of one full block."""
        return tuple(self.ids[block * self.block_size : (block + 1) * self.block_size])

    def identity(self, block: int) -> tuple[tuple[int, ...], bytes]:
        """The parts of a block that differ from its siblings: tokens and extra keys."""
        return self.block_tokens(block), self.extras.get(block, b"")

    def name_to(self, blocks: int) -> None:
        """Name the first blocks, as far as they are not named."""
        for block in range(len(self.names), blocks):
            parent = self.names[-1] if self.names and not self.flat else self.root
            self.names.append(block_name(parent, *self.identity(block)))

    def tokens(self, start: int, stop: int) -> bytes:
        """Tokens of full blocks [start, stop) as little-endian uint32."""
        require(0 <= start <= stop <= self.num_full_blocks, "blocks out of range")
        return packed(self.ids[start * self.block_size : stop * self.block_size])

    def hashes(self, start: int, stop: int) -> bytes:
        """Names of full blocks [start, stop)."""
        require(0 <= start <= stop <= self.num_full_blocks, "blocks out of range")
        self.name_to(stop)
        return b"".join(self.names[start:stop])

    def blocks(self, start: int = 0, stop: int = -1) -> list[int]:
        """A copy of the block table."""
        stop = len(self.table) if stop < 0 else stop
        require(0 <= start <= stop <= len(self.table), "positions out of range")
        return self.table[start:stop]

    def assign(self, start: int, blocks: Sequence[int]) -> None:
        """Write private blocks into the table."""
        require(0 <= start <= len(self.table), "gap: start lies beyond the end of the block table")
        require(
            not any(self.shared[start : start + len(blocks)]),
            "the block at this position belongs to the tree",
        )
        require(all(0 <= block < 2**32 - 1 for block in blocks), "device block id out of range")
        self.table[start : start + len(blocks)] = blocks
        self.shared += [False] * (len(self.table) - len(self.shared))

    def complete(self, start: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """`assign`, and a copy of the table."""
        self.assign(start, blocks)
        return tuple(self.table)

    def is_shared(self, position: int) -> bool:
        """Whether the tree owns the block at this position."""
        require(0 <= position < len(self.shared), "position out of range")
        return self.shared[position]
