"""Requests of an engine, the arguments of its calls, and the device blocks that it holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from kvactors.errors import NoRoom
from kvactors.identity import block_extras
from kvactors.native import BlockTree, Path

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


def block_ids(name: str, given: Any) -> list[int]:
    """One block or several, as Python's integers."""
    try:
        many = [*given]
    except TypeError:
        many = [given]
    return [whole(name, block) for block in many]


def at_least(least: int, name: str, value: Any) -> int:
    """An integer that is not less than `least`."""
    if (found := whole(name, value)) < least:
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


# -- Device blocks, and the requests that hold them.


class EngineBlocks:
    """Block ids 0 .. total - 1. Each is free, held by the engine, lost, or of the prefix cache: in
    its tree, or a request's own copy of a block of the tree.

    Attributes:
        free: a heap. The lowest id is handed out first.
        held: blocks that the engine was given and has not returned, with the request that each was
            given for (None: none named).
        lost: blocks that a copy or a call may still access, after a reset too.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total))
        self.held: dict[int, str | None] = {}
        self.lost: set[int] = set()
        self._earlier: set[tuple[int, str | None]] = set()  # held when the cache was reset

    def pop(self, count: int) -> list[int]:
        if count > len(self.free):
            raise NoRoom(count, len(self.free))
        return [heappop(self.free) for _ in range(count)]

    def push(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heappush(self.free, block)

    def take(self, count: int, request: str | None) -> list[int]:
        taken = self.pop(count)
        self.held.update(dict.fromkeys(taken, request))
        return taken

    def give(self, blocks: Sequence[int], request: str | None) -> None:
        """The engine returns blocks. Those that it was given before a reset are free already.
        ValueError if it does not hold one, holds it for another request, or returns it twice:
        nothing changed."""
        earlier = {
            (block, request)
            for block in blocks
            if (block, request) in self._earlier and self.held.get(block, self) != request
        }
        returned = [block for block in blocks if (block, request) not in earlier]
        self.check_held(returned, request)
        self._earlier -= earlier
        self.enter(returned)
        self.push(returned)

    def give_held(self, blocks: Sequence[int], request: str) -> None:
        """A request ends: its blocks of since the last reset are free."""
        held = {block for block in blocks if self.held.get(block) == request}
        self._earlier.difference_update((block, request) for block in blocks)
        self.enter(held)
        self.push(held)

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
        return "free already" if block in self.free else "in the prefix cache, not the engine's"

    def enter(self, blocks: Iterable[int]) -> None:
        """Blocks are not the engine's any more."""
        for block in blocks:
            del self.held[block]

    def resize(self, total: int) -> None:
        self.total = total
        self.free[:] = range(total)

    def reset(self) -> None:
        """Free what the engine holds. It may return those blocks once more."""
        self._earlier.update(self.held.items())
        self.push(self.held)
        self.held.clear()


class RequestRecord:
    """A request's path in the tree, which holds its cached blocks: those of the tree, and its own
    copies of blocks that another request has entered.

    Attributes:
        writers: one entry for each write to storage that has not ended. Its blocks are not free
            before. Changed by any thread, in one step of the interpreter.
        finished: whether its blocks are reported to indexes when it is released.
        host, host_slots: blocks after the cached ones that a match of v1 has found in host memory.
    """

    def __init__(self, name: str, request: Any, tree: BlockTree, root: bytes) -> None:
        self.request = name
        self.tree = tree
        self.path = Path(tree.block_size, root)
        self.finished = False
        self.host: list[bytes] = []
        self.host_slots: list[int] = []
        self.writers: list[None] = []
        self.has_media = self._set_media(request, tree.block_size)
        self.extend(request)

    @property
    def num_cached(self) -> int:
        return self.path.num_committed

    @property
    def blocks(self) -> list[int]:
        return self.path.blocks(0, self.num_cached)

    def enter(self, blocks: Sequence[int]) -> int:
        """Cache the next blocks of the path, which have their tokens. One that is cached already
        stays the request's own: the engine reads it. Returns the number of the others."""
        start = self.num_cached
        self.path.assign(start, blocks)
        self.tree.commit(self.path, start + len(blocks))
        return sum(map(self.path.is_shared, range(start, self.num_cached)))

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


def computed_tokens(request: Any) -> int:
    """Tokens of a request whose bytes the steps scheduled so far compute, in v1 mode: when it
    decodes, all but the last one, which was no input. Before, those up to the end of its chunk."""
    total = sum(map(len, _parts(request)))
    if total > whole("need_prefill_tokens", _attribute(request, "need_prefill_tokens")):
        return total - 1
    return whole("prefill_end_index", getattr(request, "prefill_end_index", None) or 0)


def _parts(request: Any) -> tuple[Any, Any]:
    return sequence_of(request, "prompt_token_ids"), sequence_of(request, "output_token_ids")
