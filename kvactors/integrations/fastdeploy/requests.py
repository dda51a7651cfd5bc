"""Requests of an engine: their token chains, and the blocks that they hold in the index."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from kvactors.errors import NoRoom
from kvactors.identity import block_extras
from kvactors.native import Path
from kvactors.types import HASH_BYTES

# -- Arguments of the engine's calls: checked, with their names in the error.


def rounded_up(name: str, value: Any) -> int:
    """A number of blocks, which FastDeploy's thresholds make a fraction."""
    try:
        return math.ceil(value)
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a finite number, not {value!r}") from None


def whole(name: str, value: Any) -> int:
    """An integer of any kind, numpy's included."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def at_least(least: int, name: str, value: Any) -> int:
    """An integer that is not less than `least`."""
    found = whole(name, value)
    if found < least:
        raise ValueError(f"{name} must be at least {least}, not {found}")
    return found


def sequence_of(request: Any, name: str) -> Any:
    """A list or an array of a request."""
    found: Any = _attribute(request, name)
    if isinstance(found, str | Mapping) or not hasattr(found, "__getitem__"):
        raise TypeError(
            f"{name} of request {name_of(request)!r} must be a list or an array, not "
            f"{type(found).__name__}"
        )
    return found


def name_of(request: Any) -> str:
    """The id of a request."""
    found = _attribute(request, "request_id")
    if not isinstance(found, str):
        raise TypeError(f"request_id must be a string, not {found!r}")
    return found


def _attribute(request: Any, name: str) -> Any:
    try:
        return getattr(request, name)
    except AttributeError:
        raise TypeError(
            f"a request must have {name}, and {type(request).__name__} has not"
        ) from None


def media_of(request: Any) -> tuple[list[tuple[int, int]], list[Any]]:
    """Places (offset, length) and hashes of a request's media."""
    inputs = getattr(request, "multimodal_inputs", None)
    if inputs is None:
        return [], []
    if not isinstance(inputs, Mapping):
        raise TypeError(f"multimodal_inputs must be a mapping, not {type(inputs).__name__}")
    positions, hashes = _items(inputs, "mm_positions"), _items(inputs, "mm_hashes")
    for one in positions:
        if not (hasattr(one, "offset") and hasattr(one, "length")):
            raise TypeError(f"mm_positions must have offset and length, not {one!r}")
    places = [
        (whole("a media offset", one.offset), whole("a media length", one.length))
        for one in positions
    ]
    return places, hashes


def _items(inputs: Mapping[str, Any], name: str) -> list[Any]:
    found = inputs.get(name)
    if found is None:
        return []
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise TypeError(f"{name} must be a list, not {type(found).__name__}")
    return list(found)


def required_blocks(input_token_num: int, block_size: int) -> int:
    """Blocks that so many tokens take."""
    tokens = at_least(0, "input_token_num", input_token_num)
    return -(-tokens // at_least(1, "block_size", block_size))


# -- The device's prefix index: full blocks by block hash, their references, and eviction.

SLACK = 64  # entries of the eviction order beyond twice the blocks: more are stale, and removed


@dataclass(eq=False, slots=True)
class IndexedBlock:
    """A full block on the device, held by a request at first. Its hash stands for the tokens and
    media up to its end. `used`: time of the last use, in calls of the index."""

    hash: bytes
    parent: IndexedBlock | None
    block: int
    depth: int
    used: int
    refs: int = 1
    children: int = 0


class EngineBlockIndex:
    """Blocks by hash. A block without references and children is evictable: the least recently used
    one leaves first, and of one path the deepest.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, IndexedBlock] = {}
        self.unreferenced = 0
        self._order: list[tuple[int, int, int, IndexedBlock]] = []  # a heap, with stale entries
        self._clock = 0
        self._entries = 0

    def tick(self) -> None:
        """A call of the engine begins. Blocks that it uses are equally recent."""
        self._clock += 1

    def match(self, hashes: Sequence[bytes]) -> list[IndexedBlock]:
        found = []
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[IndexedBlock]) -> None:
        for block in blocks:
            if not block.refs:
                self.unreferenced -= 1
            block.refs += 1
            block.used = self._clock

    def add(self, block_hash: bytes, parent: IndexedBlock | None, block: int) -> IndexedBlock:
        """Index a block, held by a request. Its hash is not indexed yet."""
        depth = 1
        if parent is not None:
            depth += parent.depth
            parent.children += 1
        added = self.blocks[block_hash] = IndexedBlock(
            block_hash, parent, block, depth, self._clock
        )
        return added

    def release(self, blocks: Sequence[IndexedBlock]) -> None:
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                self.unreferenced += 1
                self._enqueue(block)

    def _enqueue(self, block: IndexedBlock) -> None:
        if block.children:
            return
        if len(self._order) > 2 * len(self.blocks) + SLACK:
            self._order = [entry for entry in self._order if self._is_current(entry)]
            heapify(self._order)
        self._entries += 1
        heappush(self._order, (block.used, -block.depth, self._entries, block))

    def _is_current(self, entry: tuple[int, int, int, IndexedBlock]) -> bool:
        used, _, _, block = entry
        if block.refs or block.children or block.used != used:
            return False
        return self.blocks.get(block.hash) is block

    def evict(self, count: int) -> list[IndexedBlock]:
        """Remove blocks, at most `count`, each after its children."""
        victims: list[IndexedBlock] = []
        while len(victims) < count and self._order:
            entry = heappop(self._order)
            if not self._is_current(entry):
                continue
            block = entry[-1]
            victims.append(block)
            del self.blocks[block.hash]
            self.unreferenced -= 1
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                if not parent.refs:
                    self._enqueue(parent)
        return victims

    def clear(self) -> list[IndexedBlock]:
        """Forget every block. Returns them, children before parents."""
        gone = sorted(self.blocks.values(), key=lambda block: -block.depth)
        self.blocks.clear()
        self._order.clear()
        self.unreferenced = 0
        return gone


class FreeBlockList(Sequence[int]):
    """A view of the free blocks, for an engine that counts them. The first one is the lowest."""

    def __init__(self, heap: list[int]) -> None:
        self._heap = heap

    def __len__(self) -> int:
        return len(self._heap)

    def __getitem__(self, index: Any) -> Any:
        return self._heap[index]


class EngineBlocks:
    """Block ids 0 .. total - 1, each in one place. The lowest free id is handed out first.

    Attributes:
        held: blocks that the engine was given and has not returned, with the request that each was
            given for (None: none named).
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: dict[int, str | None] = {}
        self.indexed: set[int] = set()
        self.lost: set[int] = set()
        self._free = list(range(total))  # a heap
        self._earlier: dict[int, set[str | None]] = {}  # held when the blocks were reset
        self.free_list = FreeBlockList(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, request: str | None) -> list[int]:
        if count > len(self._free):
            raise NoRoom(count, len(self._free))
        taken = [heappop(self._free) for _ in range(count)]
        self.held.update(dict.fromkeys(taken, request))
        return taken

    def give(self, blocks: Sequence[int], request: str | None) -> None:
        """The engine returns blocks. Those that it was given before a reset are free already.
        ValueError if it does not hold one, holds it for another request, or returns it twice:
        nothing changed."""
        returned = [block for block in blocks if not self._is_earlier(block, request)]
        self.check_held(returned, request)
        for block in blocks:
            if self._is_earlier(block, request):
                self._earlier[block].discard(request)
        for block in returned:
            del self.held[block]
            heappush(self._free, block)

    def _is_earlier(self, block: int, request: str | None) -> bool:
        """Whether a request was given a block before a reset."""
        if request not in self._earlier.get(block, ()):
            return False
        return block not in self.held or self.held[block] != request

    def check_held(self, blocks: Sequence[int], request: str | None) -> None:
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"a block is named twice: {sorted(blocks)}")
        for block in blocks:
            if block not in self.held:
                raise ValueError(f"block {block} of {self.total} is {self._place(block)}")
            owner = self.held[block]
            if request is not None and owner not in (None, request):
                raise ValueError(f"block {block} is held for request {owner!r}, not {request!r}")

    def _place(self, block: int) -> str:
        if not 0 <= block < self.total:
            return "out of range"
        if block in self.lost:
            return "still in use by a copy"
        return "in the prefix cache, not the engine's" if block in self.indexed else "free already"

    def index(self, block: int) -> None:
        del self.held[block]
        self.indexed.add(block)

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.indexed.remove(block)
            heappush(self._free, block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Blocks, held or indexed until now, may still be accessed: they are nowhere else before
        `regain`, after a reset too."""
        for block in blocks:
            self.held.pop(block, None)
            self.indexed.discard(block)
            self.lost.add(block)

    def regain(self, blocks: Iterable[int]) -> None:
        """Lost blocks are accessed no more, and free."""
        for block in blocks:
            self.lost.remove(block)
            heappush(self._free, block)

    def resize(self, total: int) -> None:
        self.total = total
        self._free[:] = range(total)

    def reset(self) -> None:
        """All but lost blocks are free. Blocks that the engine holds may be returned once more."""
        for block, request in self.held.items():
            self._earlier.setdefault(block, set()).add(request)
        self.held.clear()
        self.indexed.clear()
        self._free[:] = [block for block in range(self.total) if block not in self.lost]


class RequestRecord:
    """The chain of a request's block hashes, and the blocks that it holds.

    Attributes:
        spares: blocks of its table whose hash another request's block has in the index.
        writers: one entry for each write to storage that has not ended. Its blocks are not free
            before. Changed by any thread, in one step of the interpreter.
    """

    def __init__(self, name: str, request: Any, block_size: int, root: bytes) -> None:
        self.request = name
        self.path = Path(block_size, root)
        self.nodes: list[IndexedBlock] = []
        self.spares: list[int] = []
        self.finished = False
        self.writers: list[None] = []
        self.root = root
        self.has_media = self._set_media(request, block_size)
        self.extend(request)

    def _set_media(self, request: Any, block_size: int) -> bool:
        places, hashes = media_of(request)
        if not places:
            return False
        total = sum(len(tokens) for tokens in _parts(request))
        extras = block_extras(-(-total // block_size), block_size, places, hashes, num_tokens=total)
        for block, extra in extras.items():
            self.path.set_extra(block, extra)
        return bool(extras)

    def tokens_of(self, request: Any) -> int:
        """Tokens of the request. ValueError if it has fewer than at the last `extend`."""
        total = sum(map(len, _parts(request)))
        if total < self.path.num_tokens:
            raise ValueError(
                f"request {name_of(request)!r} had {self.path.num_tokens} tokens and has "
                f"{total} now"
            )
        return total

    def extend(self, request: Any) -> None:
        """Append the tokens that the request has got since the last call, all or none."""
        chained, total = self.path.num_tokens, self.tokens_of(request)
        prompt, outputs = _parts(request)
        if chained >= len(prompt):
            fresh = outputs[chained - len(prompt) :]
        else:
            fresh = [*prompt[chained:], *outputs] if len(outputs) else prompt[chained:]
        if chained < total:
            self.path.extend(fresh)

    def hashes(self, start: int, stop: int) -> list[bytes]:
        packed = self.path.hashes(start, stop)
        return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _parts(request: Any) -> tuple[Any, Any]:
    return sequence_of(request, "prompt_token_ids"), sequence_of(request, "output_token_ids")
