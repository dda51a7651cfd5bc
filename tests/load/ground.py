"""What a client works on: an open cache, what its blocks must hold, and what may go wrong."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvactors import KVActorsError, KVCache, Lease
from kvactors.checks import Media, request_path
from kvactors.native import Path
from kvactors.types import split_hashes

if TYPE_CHECKING:
    from tests.load.client import Client

SALTS = ("salt", "other", "")

REMEMBERED = 40
"""Prompts and pins that are remembered."""

Part = Mapping[str, str]
"""The part of a cache that a clear removes, by the arguments of the call: a salt, an adapter, or
everything."""

Content = tuple[list[int], tuple[Media, ...]]
"""Tokens and media of a request."""


@dataclass
class Mix:
    """How the load is mixed: shares from 0 to 1, and weights.

    Attributes:
        families: of prompts that share their beginnings.
        longest: blocks of the longest prompt.
        orders: weights of the orders to the whole cache.
        ordered: share of orders among requests and orders.
        batches: share of requests that are batches.
        cut: calls that are cancelled. cancelled: requests that are.
        waits: requests that wait for room.
        pins: hints that pin. pins_end: pins have a time to live.
    """

    families: int
    longest: int
    orders: dict[str, int] = field(default_factory=dict)
    ordered: float = 0.15
    batches: float = 0.1
    cut: float = 0.0
    cancelled: float = 0.0
    waits: float = 0.35
    forks: float = 0.0
    hints: float = 0.0
    pins: float = 0.0
    pins_end: bool = False
    hostile: float = 0.0
    forgotten: float = 0.0
    media: float = 0.1
    scopes: float = 0.2


class Prompt(NamedTuple):
    """Tokens, and the other parts of their identity."""

    tokens: list[int]
    media: tuple[Media, ...] = ()
    salt: str | None = None
    lora: str | None = None

    @property
    def scope(self) -> dict[str, Any]:
        """The arguments of a call beside tokens and media."""
        return {"salt": self.salt, "lora": self.lora}

    def is_in(self, part: Part) -> bool:
        """Whether a clear of that part removes its blocks."""
        return part.items() <= self.scope.items()


class Row:
    """A request with a lease.

    Attributes:
        content: what the lease must have.
        ticket: of its admission (see `Ground.asked`). Forks have their parent's.
        solid: leading blocks that are committed.
        computed: leading tokens whose KV is in the blocks.
        tail: the contents of the last block, which is not full, empty if they are unknown.
        cut: whether a call on the lease was cancelled, and may have ended it.
        depth: forks above it.
    """

    def __init__(self, lease: Lease, prompt: Prompt, ticket: Any) -> None:
        self.lease = lease
        self.prompt = prompt
        self.content: Content = (list(prompt.tokens), prompt.media)
        self.ticket = ticket
        self.solid = self.computed = self.depth = 0
        self.tail = b""
        self.cut = False

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return self.content[0]

    def branch(self, lease: Lease) -> Row:
        """The request of a fork."""
        one = Row(lease, self.prompt, self.ticket)
        one.content, one.solid, one.computed = self.content, self.solid, self.computed
        one.tail, one.depth = self.tail, self.depth + 1
        return one


class Ground(ABC):
    """An open cache under load.

    Args:
        cache: the cache, None until it is open.
        mix: of the load.
        seen: counts of what was reached.

    Attributes:
        draining: orders that need every request to end soon.
        ordering: whether such an order is given.
        closing: whether the cache is being closed.
    """

    name_bytes = 32
    """Bytes of the name of a block's contents."""

    deadlines: tuple[float, ...] = (0.02, 0.02, 0.02, 0.05, 0.05, 0.05, 0.2, 2.0)
    """Seconds of requests, and of calls that add blocks."""

    moments: tuple[float, ...] = (0.0, 0.0, 0.0, 0.001)
    """Seconds between two calls."""

    patience = 30.0
    """Seconds of an order."""

    faulty = False
    """Whether parts of the cache fail: then pins may end, and invariants need not hold under
    load."""

    one_order = False
    """Whether clears, pauses and sleeps come one after another."""

    threaded = False
    """Whether other threads call the cache as well."""

    keeps_quotas = False
    """Whether the store keeps quotas of salts, and clears a salt."""

    cache: KVCache

    def __init__(self, cache: KVCache | None, mix: Mix, seen: Counter[str]) -> None:
        if cache is not None:
            self.cache = cache
        self.mix = mix
        self.seen = seen
        self.pins = Pins(self)
        self.prompts: list[tuple[str, Prompt]] = []  # of finished requests, with their namespaces
        self.draining = 0
        self.ordering = self.closing = False
        self.requests = self.finished = 0

    # -- verdicts

    @abstractmethod
    def fail(self, what: str) -> None:
        """Note a violation."""

    @abstractmethod
    def judge(self, what: str, error: KVActorsError, row: Row | None) -> None:
        """Fail unless the state of the world accounts for an error of a call."""

    async def wrong(self, row: Row, what: str) -> None:
        """Blocks of a request hold other bytes."""
        self.fail(f"wrong bytes: {what}")

    # -- calls

    def began(self, client: Client) -> Any:
        """A call of a client begins. Returns what `ended` needs."""

    def ended(self, client: Client, what: str, outcome: str, seconds: float, began: Any) -> None:
        """A call that may take `seconds` has ended."""

    # -- requests

    def asked(self) -> Any:
        """A request is about to be admitted. Returns its ticket."""

    def granted(self, row: Row) -> None:
        """A request was granted its lease, in this step of the loop."""

    def over(self, ticket: Any) -> None:
        """A request and all of its forks have ended, or it was refused."""

    async def own(self, client: Client, row: Row) -> None:
        """LeaseEnded if the blocks of a lease are not its own any more."""

    # -- blocks

    def names(self, row: Row, content: Content) -> Sequence[bytes]:
        """The name of the contents of each full block."""
        return split_hashes(named(row.lease, content).hashes)

    @abstractmethod
    async def write(self, row: Row, start: int, names: Sequence[bytes]) -> None:
        """Compute blocks of a request from position `start` on."""

    @abstractmethod
    async def differing(
        self, row: Row, start: int, names: Sequence[bytes], *, hits: bool = False
    ) -> Sequence[int]:
        """The blocks from position `start` on that do not hold those contents. hits: they were
        cached."""

    async def differing_layer(self, row: Row, layer: int, names: Sequence[bytes]) -> Sequence[int]:
        """Like `differing`, for the first blocks and one layer."""
        return ()

    # -- orders

    @asynccontextmanager
    async def clearing(self, part: Part, *, storage: bool) -> AsyncIterator[None]:
        """A clear of a part, while the block runs."""
        with self.pins.ending(part):
            yield

    def finish(self, row: Row, epoch: int) -> None:
        """A request was finished. epoch: see `Pins.begin`."""
        self.finished += 1
        prompt = row.prompt._replace(tokens=list(row.tokens), media=row.content[1])
        if row.lease.pinned_blocks:
            self.pins.add(epoch, prompt, row.lease.pinned_blocks)
        if not prompt.media and len(self.prompts) < REMEMBERED:
            self.prompts.append((self.cache.namespace, prompt))


class Pins:
    """Pinned prompts, which are on the device until something ends their pins."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.epoch = 0
        self._changes = 0  # that may end pins, in progress
        self._held: dict[tuple[str, bytes], Prompt] = {}  # by namespace and last hash

    @contextmanager
    def ending(self, part: Part, *, only: tuple[str, bytes] | None = None) -> Iterator[None]:
        """Within the block pins may end: those of a part, or one."""
        for key, one in list(self._held.items()):
            if key == only or (only is None and one.is_in(part)):
                del self._held[key]
        with self.changing():
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within the block the pins of requests that end, and unpins, are not relied on."""
        self.epoch += 1
        self._changes += 1
        try:
            yield
        finally:
            self._changes -= 1
            self.epoch += 1

    def begin(self) -> int:
        """A request is about to end. For `add`, -1 if its pin is not to be relied on."""
        return -1 if self._changes or self.ground.mix.pins_end else self.epoch

    def add(self, epoch: int, prompt: Prompt, blocks: int) -> None:
        """A request has ended, and `blocks` are pinned since."""
        ground = self.ground
        ground.seen["pinned"] += 1
        known = ground.faulty or (epoch == self.epoch and not self._changes)
        if known and not prompt.media and len(self._held) < REMEMBERED:
            tokens = prompt.tokens[: blocks * ground.cache.block_size]
            key = ground.cache.namespace, repr((tokens, prompt.scope)).encode()
            self._held[key] = prompt._replace(tokens=tokens)

    def check(self) -> None:
        """Every pinned block is on the device, and no more than the share of them are."""
        ground, cache = self.ground, self.ground.cache
        most = int(cache.config.hints.pin_share * cache.config.device.num_blocks)
        if cache.statistics().prefix.pinned > most:
            ground.fail(f"more than {most} blocks are pinned")
        if self._changes or cache.system.asleep:
            return
        for (namespace, _), one in self._held.items():
            if namespace == cache.namespace:
                full = len(one.tokens) // cache.block_size
                found = cache.lookup([*one.tokens, 1], **one.scope).device
                ground.seen["pins looked up"] += 1
                if found < full:
                    ground.fail(f"{found} of {full} pinned blocks are on the device")

    def draw(self, rng: random.Random) -> tuple[tuple[str, bytes], Prompt] | None:
        """A pin of the present namespace. The same tokens may be pinned in several."""
        known = [one for one in self._held.items() if one[0][0] == self.ground.cache.namespace]
        return rng.choice(known) if known else None


# -- contents


def extended(content: Content, added: Content) -> Content:
    """A content with tokens and media appended."""
    start = len(content[0])
    media = tuple((start + offset, length, digest) for offset, length, digest in added[1])
    return content[0] + added[0], content[1] + media


def truncated(content: Content, kept: int) -> Content:
    """A content without the tokens from `kept` on."""
    return content[0][:kept], tuple(one for one in content[1] if one[0] < kept)


class Named(NamedTuple):
    """Everything that names the tokens and blocks of a path. last: the extra key of the last
    block."""

    num_tokens: int
    tokens: bytes
    hashes: bytes
    last: bytes


def content_of(path: Path) -> Named:
    """The names of a path."""
    size, blocks = path.block_size, -(-path.num_tokens // path.block_size)
    padded = Path(size, path.root)  # tokens are read by full blocks
    padded.append(path)
    padded.extend([0] * (blocks * size - path.num_tokens))
    hashes = path.hashes(0, path.num_full_blocks)
    return Named(path.num_tokens, padded.tokens(0, blocks), hashes, path.extra_key(blocks - 1))


def named(lease: Lease, content: Content) -> Named:
    """`content_of` the same request made at once."""
    path, _ = request_path(lease._path.block_size, lease._path.root, *content)
    return content_of(path)
