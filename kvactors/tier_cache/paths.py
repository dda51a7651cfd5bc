"""Paths of blocks, as an engine describes them for sinks. Pure state, used by one thread."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvactors.flush_notifier.messages import PathPart, RequestScope

NAME_BYTES = 32
NAME_DOMAIN = b"kvactors.tiers.block.v1"


class DescribedBlock(NamedTuple):
    """The place of a block in its path.

    Attributes:
        parent: name of the block before it, or the root.
        tokens: its own, little-endian uint32.
        scope: adapter and salt.
        extra_key: of its media, empty without.
        first: whether it is the first block of its path.
    """

    parent: bytes
    tokens: bytes
    scope: RequestScope
    extra_key: bytes
    first: bool


def block_name(key: bytes) -> bytes:
    """The 32-byte name under which sinks are sent a key: the key itself if it has that length, else
    its SHA-256."""
    return key if len(key) == NAME_BYTES else sha256(NAME_DOMAIN + key).digest()


class DescribedPath(NamedTuple):
    """Consecutive blocks of a path.

    Attributes:
        keys: the engine's names of the blocks.
        tokens: of all of them, little-endian uint32.
        parent: the key before them, None if they begin their path.
        lora, salt: of their requests.
        extra_keys: by index.
    """

    keys: list[bytes]
    tokens: bytes
    parent: bytes | None
    lora: str | None
    salt: str | None
    extra_keys: dict[int, bytes]


def checked_path(
    keys: list[bytes],
    tokens: Any,
    block_size: int,
    parent: bytes | None,
    lora: str | None,
    salt: str | None,
    extra_keys: Iterable[tuple[Any, Any]],
) -> DescribedPath:
    """A path as an engine describes it.

    Raises:
        ValueError: there are not `block_size` tokens for each block, one is no integer in
            [0, 2**32), or another argument is of a wrong type.
    """
    try:
        packed = array("I", tokens)
        extra: dict[Any, Any] = dict(extra_keys)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            "tokens must be integers from 0 to 2**32 - 1, and extra keys pairs of an index and "
            f"bytes: {error}"
        ) from None
    if len(packed) != len(keys) * block_size:
        raise ValueError(f"{len(packed)} tokens of {len(keys)} blocks of {block_size} tokens")
    for i, extra_key in extra.items():
        if not isinstance(i, int) or not isinstance(extra_key, bytes) or not 0 <= i < len(keys):
            raise ValueError(f"({i!r}, {extra_key!r}) is no extra key of {len(keys)} blocks")
    for name, value in (("lora", lora), ("salt", salt)):
        if not isinstance(value, str | None):
            raise ValueError(f"{name} must be a string or None, not {value!r}")
    return DescribedPath(keys, packed.tobytes(), parent, lora, salt, extra)


class PathBook:
    """The described blocks: all that a tier holds, and some that none holds.

    Args:
        idle_limit: blocks kept that no tier holds. Beyond that the oldest is forgotten.
    """

    def __init__(self, idle_limit: int) -> None:
        self._idle_limit = idle_limit
        self._held: dict[bytes, DescribedBlock] = {}
        self._idle: dict[bytes, DescribedBlock] = {}

    def add(self, blocks: Mapping[bytes, DescribedBlock], is_held: Iterable[bool]) -> list[bytes]:
        """An engine described blocks.

        Args:
            blocks: by name.
            is_held: for each, whether a tier holds it.

        Returns:
            The held ones that were not described before.
        """
        new = []
        for (name, block), held in zip(blocks.items(), is_held, strict=True):
            if held and name not in self._held:
                self._held[name] = block
                new.append(name)
            elif not held:
                self._idle.pop(name, None)
                self._idle[name] = block
        while len(self._idle) > self._idle_limit:
            del self._idle[next(iter(self._idle))]
        return new

    def hold(self, names: Iterable[bytes]) -> None:
        """A tier holds these blocks now."""
        for name in names:
            block = self._idle.pop(name, None)
            if block is not None:
                self._held[name] = block

    def release(self, names: Iterable[bytes]) -> None:
        """No tier holds these blocks any more."""
        gone = {name: self._held.pop(name) for name in names if name in self._held}
        self.add(gone, [False] * len(gone))

    def parts(self, names: Sequence[bytes] | None = None) -> tuple[PathPart, ...]:
        """Runs of described blocks that a tier holds.

        Args:
            names: which. None: all.
        """
        from kvactors.flush_notifier.messages import PathPart

        found: list[tuple[DescribedBlock, list[bytes], list[DescribedBlock]]] = []
        last = b""
        for name in list(self._held) if names is None else names:
            block = self._held.get(name)
            if block is None:
                continue
            if found and block.parent == last and block.scope == found[-1][0].scope:
                found[-1][1].append(name)
                found[-1][2].append(block)
            else:
                found.append((block, [name], [block]))
            last = name
        return tuple(
            PathPart(
                first.parent,
                b"".join(run),
                b"".join(block.tokens for block in blocks),
                first.scope,
                tuple((i, block.extra_key) for i, block in enumerate(blocks) if block.extra_key),
            )
            for first, run, blocks in found
        )

    def roots(self, names: Sequence[bytes] | None = None) -> frozenset[bytes]:
        """The roots of these blocks' paths. None: of all."""
        blocks = (self._held.get(name) for name in (list(self._held) if names is None else names))
        return frozenset(block.parent for block in blocks if block is not None and block.first)
