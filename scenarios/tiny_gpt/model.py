"""A small decoder whose keys, values and states are in paged blocks of kvactors' layouts, computed
by Paddle on the CPU.

Everything is computed in one shape: a chunk is one block, rows without a token of the pass are
padded, and attention reads the blocks from the first that it needs up to this one. States are
updated token by token. A row's arithmetic therefore depends on its position only, not on whether it
is prefilled, decoded, or computed again after a preemption: the bits must be the same. Any
difference is a fault in moving the blocks.

A `Trunk` (embedding, feed-forward, head) meets one `Shard` of each kind of layers for each rank,
and adds what they give in the order of ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

os.environ["OMP_NUM_THREADS"] = (
    "1"  # before Paddle is imported: one order of summation, and faster on a busy machine
)

import numpy as np

from kvactors.device.paddle import PaddleDevice, import_paddle
from kvactors.layout import make_layout
from kvactors.settings import LayoutConfig

BLOCK = 16
"""Tokens a block, and rows a chunk."""
MASKED = -1e30
KINDS = ("full", "window", "state")
"""Kinds of layers: the groups of a model in the order of their block tables."""
WINDOW = 40
"""Tokens that a window layer attends to, the newest included: not a multiple of BLOCK."""
TAPS = 4
"""Inputs that a state layer's convolution sees."""
REMEMBER = 4.0
"""Bias of a state's gates: an input loses half its weight in about 38 tokens."""
paddle = import_paddle()


class Sizes(NamedTuple):
    """Of the whole model. nope, rope, latent: of the MLA variant. keys: rows of a head's state."""

    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 2
    head: int = 32
    hidden: int = 344
    vocabulary: int = 512
    positions: int = 4096
    nope: int = 16
    rope: int = 16
    latent: int = 48
    keys: int = 16


SIZES = Sizes()


class Pass(NamedTuple):
    """A pass over tokens `start` to before `stop` of a request, computed block by block. tables:
    the request's block table of each group of layers, at least as far as `stop`."""

    tables: tuple[tuple[int, ...], ...]
    start: int
    stop: int


class Chunk(NamedTuple):
    """One block's worth of a pass. tokens: those of block number `block` of the request up to the
    chunk's end, at most BLOCK of them. first: row of the chunk's first token. Rows before it are
    computed already. logits: rows whose logits are wanted, None for none."""

    step: Pass
    block: int
    tokens: tuple[int, ...]
    first: int
    logits: slice | None

    def place(self, kind: str, table: Sequence[int]) -> Place:
        """Of the rows in the layers of a kind, whose block table this is."""
        step, blocks = self.step, tuple(table[: self.block + 1])
        if kind == "state":
            target = table[(step.stop - 1) // BLOCK]
            source = table[(step.start - 1) // BLOCK] if step.start else -1
            begins = self.block * BLOCK + self.first == step.start
            blocks = (source if begins else target, target)
        return Place(blocks, self.first, len(self.tokens))


class Place(NamedTuple):
    """The device blocks of a chunk in a layer, and its rows. blocks: those of the request up to the
    chunk's, -1 for those before a window. In a state layer the block whose state the chunk
    continues (-1: none), and the block that its state goes to."""

    blocks: tuple[int, ...]
    first: int
    end: int


class Attention(Protocol):
    """All ranks' shares of the layers with a cache, wherever they are."""

    def attend(self, layer: int, place: Place, x: np.ndarray) -> list[np.ndarray]:
        """The rows that each rank adds to x. The keys and values, or the state, of x go to the last
        block of the place."""
        ...

    def digest(self, blocks: Sequence[Sequence[int]]) -> list[bytes]:
        """SHA-256 of what these blocks of each group hold, on each rank."""
        ...

    def tamper(self, fault: str, group: int, blocks: Sequence[int]) -> None:
        """poison: every block of every group becomes not-a-number. swap_blocks, flip_bit: to
        `blocks` of one layer of a group on rank 0."""
        ...


def layer_kinds(kinds: Sequence[str], sizes: Sizes = SIZES) -> list[str]:
    """The kind of every layer: the given ones in turn."""
    return [kinds[number % len(kinds)] for number in range(sizes.layers)]


def groups_of(kinds: Sequence[str]) -> list[str]:
    """The kinds that occur, in the order of their block tables."""
    return [kind for kind in KINDS if kind in kinds]


def live(kind: str, computed: int) -> range:
    """Blocks that the layers of a kind need after the first `computed` tokens of a request: full
    ones, or that of the state."""
    if kind == "state":
        return range((computed - 1) // BLOCK, (computed - 1) // BLOCK + 1)
    first = max(0, computed - WINDOW + 1) // BLOCK if kind == "window" else 0
    return range(first, computed // BLOCK)


def layout_config(kind: str, layers: int, ranks: int, sizes: Sizes = SIZES) -> LayoutConfig:
    """The library's description of the cache of some layers."""
    if kind == "gqa":
        return LayoutConfig(
            "gqa", layers, sizes.kv_heads, sizes.head, "float32", tensor_parallel=ranks
        )
    if kind == "state":
        shapes = {"conv": [TAPS - 1, sizes.width], "ssm": [sizes.heads, sizes.keys, sizes.head]}
        tensors = {name: {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()}
        return LayoutConfig("state", layers, options=tensors)
    return LayoutConfig(
        "mla",
        layers,
        dtype="float32",
        kv_lora_rank=sizes.latent,
        qk_rope_head_dim=sizes.rope,
        tensor_parallel=ranks,
    )


class Weights:
    """Random matrices, the same for the same seed and name in every process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """A matrix scaled by its first size."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        return (rng.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32)


def tensor(array: np.ndarray) -> Any:
    """As Paddle's, a copy."""
    return paddle.to_tensor(np.ascontiguousarray(array))


def norm(x: Any) -> Any:
    """Root mean square normalisation."""
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Rotary:
    """Rotary position embedding of rows at a block's positions."""

    def __init__(self, size: int, positions: int) -> None:
        angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(0, size, 2) / size))
        self.cos, self.sin = (
            tensor(np.cos(angles).astype(np.float32)),
            tensor(np.sin(angles).astype(np.float32)),
        )

    def __call__(self, x: Any, block: int) -> Any:
        """x: [heads, BLOCK, size]."""
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        cos, sin = self.cos[at].unsqueeze(0), self.sin[at].unsqueeze(0)
        a, b = paddle.chunk(x, 2, axis=-1)
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)


@cache
def visible(first: int, block: int, window: int) -> Any:
    """[BLOCK, tokens from block number `first` on]: a row sees the `window` tokens up to itself."""
    keys = np.arange(first * BLOCK, (block + 1) * BLOCK)
    rows = block * BLOCK + np.arange(BLOCK)[:, None]
    seen = (keys <= rows) & (keys > rows - window)
    return tensor(np.where(seen, 0.0, MASKED).astype(np.float32))


class Shard(ABC):
    """One rank's heads in the layers of a kind, and its part of every block. `device` is what
    kvactors is given.

    numbers: the layers' in the model. window: tokens that the layers attend to, all by default.
    """

    def __init__(
        self,
        kind: str,
        seed: int,
        num_blocks: int,
        numbers: Sequence[int],
        *,
        window: int = SIZES.positions,
        rank: int = 0,
        ranks: int = 1,
        sizes: Sizes = SIZES,
    ) -> None:
        if sizes.heads % ranks:
            raise ValueError(f"{sizes.heads} heads cannot be shared among {ranks} ranks")
        self.sizes, self.weights, self.window = sizes, Weights(seed), window
        self.heads = sizes.heads // ranks
        self.mine = slice(rank * self.heads, (rank + 1) * self.heads)
        self.layout = make_layout(layout_config(kind, len(numbers), ranks, sizes), BLOCK)
        self.device = PaddleDevice.allocate(self.layout, num_blocks)
        self.views = [np.from_dlpack(one) for one in self.device.tensors]
        self.layers = [self.make_layer(number, rank, ranks) for number in numbers]

    @abstractmethod
    def make_layer(self, layer: int, rank: int, ranks: int) -> dict[str, Any]:
        """Weights of a layer, as far as they are this rank's."""

    @abstractmethod
    def rows(self, layer: int, place: Place, h: Any) -> Any:
        """The layer's part of the output, before the heads are mixed. Writes the last block of the
        place. layer: counted from the shard's first. h: [BLOCK, width]."""

    def attend(self, layer: int, place: Place, x: np.ndarray) -> np.ndarray:
        """The contribution of the shard's heads to x, [BLOCK, width]."""
        with paddle.no_grad():
            mixed = self.rows(layer, place, norm(tensor(x))) @ self.layers[layer]["out"]
            return np.asarray(mixed.numpy())

    def write(self, region: int, place: Place, rows: Any) -> None:
        """The chunk's rows of a region and the padding behind them, by address: copies of other
        blocks run in the same time."""
        self.views[region][place.blocks[-1], :, place.first :] = rows.numpy()[:, place.first :]

    def digest(self, blocks: Sequence[int]) -> bytes:
        """SHA-256 of these blocks, all layers."""
        digest = hashlib.sha256()
        for view in self.views:
            digest.update(view[list(blocks)].tobytes())
        return digest.digest()

    def first_block(self, block: int) -> int:
        """The first block that the rows of this one attend to."""
        return max(0, block * BLOCK - self.window + 1) // BLOCK

    def gather(self, region: int, place: Place) -> Any:
        """[heads, tokens, size] of the blocks that the rows attend to, one after the other. In
        place of a block that the window has left is the last one: those tokens are masked."""
        blocks = place.blocks
        table = [
            at if at >= 0 else blocks[-1] for at in blocks[self.first_block(len(blocks) - 1) :]
        ]
        found = paddle.index_select(
            self.device.tensors[region], tensor(np.asarray(table, np.int64)), axis=0
        )
        count, heads, _, size = found.shape
        return found.transpose([1, 0, 2, 3]).reshape([heads, count * BLOCK, size])

    def mask(self, block: int) -> Any:
        """See `visible`."""
        return visible(self.first_block(block), block, self.window)

    def tamper(self, fault: str, blocks: Sequence[int]) -> None:
        """See `Attention`."""
        roles = self.layout.span(range(1)).stop
        for view in self.views if fault == "poison" else ():
            view.fill(np.nan)
        if fault == "swap_blocks":
            a, b = (*blocks, (blocks[0] + 1) % len(self.views[0]))[:2]
            for view in self.views[-roles:]:
                view[[a, b]] = view[[b, a]]
        if fault == "flip_bit":  # the last block is in every window
            self.views[-1][blocks[-1]].view(np.uint32).reshape(-1)[BLOCK] ^= 1 << A_BIT


A_BIT = 16
"""Of a value's mantissa: 0.8 % of it at most. The lowest may be rounded away before it reaches the
logits."""


class GQAShard(Shard):
    """Grouped queries: caches[2 * layer] are keys, caches[2 * layer + 1] values, each [blocks,
    heads, BLOCK, head]."""

    def make_layer(self, layer: int, rank: int, ranks: int) -> dict[str, Any]:
        """See `Shard`."""
        s, kv = self.sizes, self.sizes.kv_heads // ranks
        if not hasattr(self, "rotary"):
            self.rotary = Rotary(s.head, s.positions)
        theirs = slice(rank * kv, (rank + 1) * kv)
        name, width = f"{layer}.", s.width
        q = self.weights(name + "q", width, s.heads, s.head)[:, self.mine]
        k, v = (self.weights(name + one, width, s.kv_heads, s.head)[:, theirs] for one in "kv")
        out = self.weights(name + "o", s.heads * s.head, width).reshape(s.heads, s.head, width)[
            self.mine
        ]
        made = {"q": q, "k": k, "v": v}
        return {n: tensor(w.reshape(width, -1)) for n, w in made.items()} | {
            "out": tensor(out.reshape(-1, width))
        }

    def rows(self, layer: int, place: Place, h: Any) -> Any:
        """See `Shard`."""
        p, size, block = self.layers[layer], self.sizes.head, len(place.blocks) - 1
        split = [BLOCK, -1, size]
        q = self.rotary((h @ p["q"]).reshape(split).transpose([1, 0, 2]), block)
        key, value = 2 * layer, 2 * layer + 1
        self.write(key, place, self.rotary((h @ p["k"]).reshape(split).transpose([1, 0, 2]), block))
        self.write(value, place, (h @ p["v"]).reshape(split).transpose([1, 0, 2]))
        keys, values = self.gather(key, place), self.gather(value, place)
        groups, tokens = keys.shape[0], keys.shape[1]
        scores = q.reshape([groups, -1, size]) @ keys.transpose([0, 2, 1]) / math.sqrt(size)
        scores = scores.reshape([self.heads, BLOCK, tokens]) + self.mask(block)
        seen = paddle.nn.functional.softmax(scores, axis=-1).reshape([groups, -1, tokens]) @ values
        return seen.reshape([self.heads, BLOCK, size]).transpose([1, 0, 2]).reshape([BLOCK, -1])


class MLAShard(Shard):
    """Latent attention: caches[layer] is [blocks, 1, BLOCK, latent + rope], the same on every rank;
    queries come to the latent."""

    def make_layer(self, layer: int, rank: int, ranks: int) -> dict[str, Any]:
        """See `Shard`."""
        s, name = self.sizes, f"{layer}."
        if not hasattr(self, "rotary"):
            self.rotary = Rotary(s.rope, s.positions)
        q = self.weights(name + "q", s.width, s.heads, s.nope + s.rope)[:, self.mine].reshape(
            s.width, -1
        )
        down = self.weights(name + "down", s.width, s.latent + s.rope)
        up_key = self.weights(name + "uk", s.nope, s.heads, s.latent)[:, self.mine].transpose(
            1, 0, 2
        )
        up_value = self.weights(name + "uv", s.latent, s.heads, s.head)[:, self.mine].transpose(
            1, 0, 2
        )
        out = self.weights(name + "o", s.heads * s.head, s.width).reshape(s.heads, s.head, s.width)[
            self.mine
        ]
        made = {
            "q": q,
            "down": down,
            "up_key": up_key,
            "up_value": up_value,
            "out": out.reshape(-1, s.width),
        }
        return {n: tensor(w) for n, w in made.items()}

    def rows(self, layer: int, place: Place, h: Any) -> Any:
        """See `Shard`."""
        p, s, block = self.layers[layer], self.sizes, len(place.blocks) - 1
        q = (h @ p["q"]).reshape([BLOCK, self.heads, -1]).transpose([1, 0, 2])
        q = paddle.concat(
            [q[..., : s.nope] @ p["up_key"], self.rotary(q[..., s.nope :], block)], axis=-1
        )
        down = (h @ p["down"]).unsqueeze(0)
        own = paddle.concat(
            [norm(down[..., : s.latent]), self.rotary(down[..., s.latent :], block)], axis=-1
        )
        self.write(layer, place, own)
        keys = self.gather(layer, place)[0]
        scores = (
            q.reshape([-1, s.latent + s.rope]) @ keys.transpose([1, 0]) / math.sqrt(s.nope + s.rope)
        )
        scores = scores.reshape([self.heads, BLOCK, -1]) + self.mask(block)
        weights = paddle.nn.functional.softmax(scores, axis=-1).reshape([self.heads * BLOCK, -1])
        seen = (weights @ keys[:, : s.latent]).reshape([self.heads, BLOCK, s.latent]) @ p[
            "up_value"
        ]
        return seen.transpose([1, 0, 2]).reshape([BLOCK, -1])


class StateShard(Shard):
    """A gated recurrence over heads of keys and values, after a short convolution:
    caches[2 * layer] are the convolution's last inputs, [blocks, TAPS - 1, width],
    caches[2 * layer + 1] the states, [blocks, heads, keys, head]."""

    def make_layer(self, layer: int, rank: int, ranks: int) -> dict[str, Any]:
        """See `Shard`."""
        s, name = self.sizes, f"{layer}."
        sizes = {"q": s.keys, "k": s.keys, "gate": s.keys, "v": s.head}
        made = {n: self.weights(name + n, s.width, s.heads * size) for n, size in sizes.items()}
        made["out"] = self.weights(name + "o", s.heads * s.head, s.width)
        taps = self.weights(name + "conv", TAPS, s.width)
        return {n: tensor(w) for n, w in made.items()} | {"conv": taps}

    def rows(self, layer: int, place: Place, h: Any) -> Any:
        """See `Shard`."""
        p, s, (source, target) = self.layers[layer], self.sizes, place.blocks
        inputs, states = self.views[2 * layer : 2 * layer + 2]
        rows, count = range(place.first, place.end), place.end - place.first
        past = inputs[source] if source >= 0 else np.zeros_like(inputs[target])
        line = np.concatenate([past, h.numpy()[place.first : place.end]])
        mixed = np.zeros((BLOCK, s.width), np.float32)
        for tap in range(TAPS):
            mixed[place.first : place.end] += p["conv"][tap] * line[tap : tap + count]
        u, split = tensor(mixed), [BLOCK, s.heads, -1]
        q, k, v = ((u @ p[name]).reshape(split).numpy() for name in "qkv")
        gate = paddle.nn.functional.sigmoid(u @ p["gate"] + REMEMBER).reshape(split).numpy()
        state = states[source] if source >= 0 else np.zeros_like(states[target])
        seen = np.zeros((BLOCK, s.heads, s.head), np.float32)
        for row in rows:  # token by token: the same bits however passes divide a prompt
            state = gate[row][..., None] * state + k[row][..., None] * v[row][:, None]
            seen[row] = (q[row][..., None] * state).sum(1)
        inputs[target], states[target] = line[1 - TAPS :], state
        return norm(tensor(seen.reshape(BLOCK, -1)))


SHARDS = {"gqa": GQAShard, "mla": MLAShard, "state": StateShard}
"""By the layouts that kvactors calls so."""


class Here:
    """The layers with a cache of one rank, in this process. layout: of those with attention.
    kinds: of every layer. blocks: of the device, by kind."""

    def __init__(
        self, layout: str, kinds: Sequence[str], seed: int, blocks: Mapping[str, int]
    ) -> None:
        self.kinds = kinds
        self.shards: dict[str, Shard] = {}
        for kind in groups_of(kinds):
            numbers = [number for number, own in enumerate(kinds) if own == kind]
            window = WINDOW if kind == "window" else SIZES.positions
            name = "state" if kind == "state" else layout
            self.shards[kind] = SHARDS[name](name, seed, blocks[kind], numbers, window=window)

    def attend(self, layer: int, place: Place, x: np.ndarray) -> list[np.ndarray]:
        """See `Attention`."""
        kind = self.kinds[layer]
        return [self.shards[kind].attend(self.kinds[:layer].count(kind), place, x)]

    def tamper(self, fault: str, group: int, blocks: Sequence[int]) -> None:
        """See `Attention`."""
        for number, shard in enumerate(self.shards.values()):
            if fault == "poison" or number == group:
                shard.tamper(fault, blocks)

    def digest(self, blocks: Sequence[Sequence[int]]) -> list[bytes]:
        """See `Attention`."""
        return [shard.digest(own) for shard, own in zip(self.shards.values(), blocks, strict=True)]


class Trunk:
    """The parts without a cache: embedding, feed-forward, head, and the sum over the ranks. kinds:
    of every layer."""

    def __init__(
        self, seed: int, attention: Attention, kinds: Sequence[str], sizes: Sizes = SIZES
    ) -> None:
        weights, s = Weights(seed), sizes
        self.attention, self.kinds, self.groups = attention, kinds, groups_of(kinds)
        self.embedding = weights("embedding", s.vocabulary, s.width) * np.float32(
            math.sqrt(s.vocabulary)
        )
        self.head = tensor(weights("head", s.width, s.vocabulary) * np.float32(3.0))
        shapes = {
            "gate": (s.width, s.hidden),
            "up": (s.width, s.hidden),
            "down": (s.hidden, s.width),
        }
        self.layers = [
            {n: tensor(weights(f"{i}.{n}", *shape)) for n, shape in shapes.items()}
            for i in range(s.layers)
        ]

    def digest(self, tables: Sequence[Sequence[int]], computed: int) -> list[bytes]:
        """SHA-256 of the blocks of each group that are needed after the first `computed` tokens."""
        return self.attention.digest(self.live_blocks(tables, computed))

    def live_blocks(self, tables: Sequence[Sequence[int]], computed: int) -> list[list[int]]:
        """See `live`: device blocks of each group."""
        return [
            [table[block] for block in live(kind, computed)]
            for kind, table in zip(self.groups, tables, strict=True)
        ]

    def step(self, chunk: Chunk) -> np.ndarray | None:
        """A chunk's way through the model: the logits of the rows that were asked for. Belongs in a
        worker thread."""
        with paddle.no_grad():  # gradient mode is a thread's own
            return self._step(chunk)

    def _step(self, chunk: Chunk) -> np.ndarray | None:
        padded = np.zeros(BLOCK, np.int64)
        padded[: len(chunk.tokens)] = chunk.tokens
        x = self.embedding[padded]
        tables = zip(self.groups, chunk.step.tables, strict=True)
        places = {kind: chunk.place(kind, table) for kind, table in tables}
        for layer, (kind, p) in enumerate(zip(self.kinds, self.layers, strict=True)):
            for part in self.attention.attend(layer, places[kind], x):
                x = x + part
            h = norm(tensor(x))
            x = x + np.asarray(
                ((paddle.nn.functional.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]).numpy()
            )
        if chunk.logits is None:
            return None
        logits: np.ndarray = (norm(tensor(x)) @ self.head).numpy()
        return np.array(logits[chunk.logits])
