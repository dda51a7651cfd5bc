"""A small decoder whose keys and values are in paged blocks of kvactors' layout, computed by Paddle
on the CPU.

Everything is computed in one shape: a chunk is one block, rows that hold no token yet are padded,
and attention reads the blocks from the first up to this one. A row's arithmetic therefore
depends on its position only, not on whether it is prefilled, decoded, or computed again
after a preemption: the bits must be the same. Any difference is a fault in moving the blocks.

A `Trunk` (embedding, feed-forward, head) meets one `Shard` of the attention for each rank, and adds
what they give in the order of ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
paddle = import_paddle()


class Sizes(NamedTuple):
    """Of the whole model. nope, rope, latent: of the MLA variant."""

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


SIZES = Sizes()


class Chunk(NamedTuple):
    """One block's worth of work. tokens: those of block number `block` of the request, at most
    BLOCK of them. table: the request's device blocks, at least as far as this one. rows: those
    whose logits are wanted, None for none."""

    table: tuple[int, ...]
    block: int
    tokens: tuple[int, ...]
    rows: slice | None


class Attention(Protocol):
    """All ranks' shares of the attention, wherever they are."""

    def attend(self, layer: int, table: Sequence[int], x: np.ndarray) -> list[np.ndarray]:
        """The rows that each rank adds to x. The keys (and values) of x go to the last block of the
        table."""
        ...

    def digest(self, blocks: Sequence[int]) -> list[bytes]:
        """SHA-256 of what these blocks hold, on each rank."""
        ...

    def tamper(self, kind: str, blocks: Sequence[int]) -> None:
        """poison: every block becomes not-a-number. swap_blocks, flip_bit: to `blocks` of one layer
        on rank 0."""
        ...


def layout_config(kind: str, ranks: int, sizes: Sizes = SIZES) -> LayoutConfig:
    """The library's description of the cache."""
    if kind == "gqa":
        return LayoutConfig(
            "gqa", sizes.layers, sizes.kv_heads, sizes.head, "float32", tensor_parallel=ranks
        )
    return LayoutConfig(
        "mla",
        sizes.layers,
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
def causal(block: int) -> Any:
    """[BLOCK, (block + 1) * BLOCK]: a row sees itself and what is before it."""
    keys, rows = np.arange((block + 1) * BLOCK), block * BLOCK + np.arange(BLOCK)
    return tensor(np.where(keys[None, :] <= rows[:, None], 0.0, MASKED).astype(np.float32))


class Shard(ABC):
    """One rank's heads and its part of every block. `device` is what kvactors is given."""

    def __init__(
        self,
        kind: str,
        seed: int,
        num_blocks: int,
        rank: int = 0,
        ranks: int = 1,
        sizes: Sizes = SIZES,
    ) -> None:
        if sizes.heads % ranks:
            raise ValueError(f"{sizes.heads} heads cannot be shared among {ranks} ranks")
        self.sizes, self.weights = sizes, Weights(seed)
        self.heads = sizes.heads // ranks
        self.mine = slice(rank * self.heads, (rank + 1) * self.heads)
        self.layout = make_layout(layout_config(kind, ranks, sizes), BLOCK)
        self.device = PaddleDevice.allocate(self.layout, num_blocks)
        self.views = [np.from_dlpack(one) for one in self.device.tensors]
        self.layers = [self.make_layer(layer, rank, ranks) for layer in range(sizes.layers)]

    @abstractmethod
    def make_layer(self, layer: int, rank: int, ranks: int) -> dict[str, Any]:
        """Weights of a layer, as far as they are this rank's."""

    @abstractmethod
    def rows(self, layer: int, table: Sequence[int], h: Any) -> Any:
        """Attention's part of the output, before the heads are mixed. Writes the last block of the
        table. h: [BLOCK, width]."""

    def attend(self, layer: int, table: Sequence[int], x: np.ndarray) -> np.ndarray:
        """The contribution of the shard's heads to x, [BLOCK, width]."""
        with paddle.no_grad():
            mixed = self.rows(layer, table, norm(tensor(x))) @ self.layers[layer]["out"]
            return np.asarray(mixed.numpy())

    def write(self, region: int, block: int, rows: Any) -> None:
        """A block's part of a region, by address: copies of other blocks run in the same time."""
        self.views[region][block] = rows.numpy()

    def digest(self, blocks: Sequence[int]) -> bytes:
        """SHA-256 of these blocks, all layers."""
        digest = hashlib.sha256()
        for view in self.views:
            digest.update(view[list(blocks)].tobytes())
        return digest.digest()

    def gather(self, region: int, table: Sequence[int]) -> Any:
        """[heads, tokens, size] of a request, block after block."""
        found = paddle.index_select(
            self.device.tensors[region], tensor(np.asarray(table, np.int64)), axis=0
        )
        blocks, heads, _, size = found.shape
        return found.transpose([1, 0, 2, 3]).reshape([heads, blocks * BLOCK, size])

    def tamper(self, kind: str, blocks: Sequence[int]) -> None:
        """See `Attention`."""
        roles = self.layout.span(range(1)).stop
        for view in self.views if kind == "poison" else ():
            view.fill(np.nan)
        if kind == "swap_blocks":
            a, b = blocks[:2]
            for view in self.views[roles : 2 * roles]:
                view[[a, b]] = view[[b, a]]
        if kind == "flip_bit":
            self.views[roles * 2 - 1][blocks[0]].view(np.uint32).reshape(-1)[BLOCK] ^= 1 << A_BIT


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

    def rows(self, layer: int, table: Sequence[int], h: Any) -> Any:
        """See `Shard`."""
        p, size, block = self.layers[layer], self.sizes.head, len(table) - 1
        split = [BLOCK, -1, size]
        q = self.rotary((h @ p["q"]).reshape(split).transpose([1, 0, 2]), block)
        key, value = 2 * layer, 2 * layer + 1
        self.write(
            key, table[-1], self.rotary((h @ p["k"]).reshape(split).transpose([1, 0, 2]), block)
        )
        self.write(value, table[-1], (h @ p["v"]).reshape(split).transpose([1, 0, 2]))
        keys, values = self.gather(key, table), self.gather(value, table)
        groups, tokens = keys.shape[0], keys.shape[1]
        scores = q.reshape([groups, -1, size]) @ keys.transpose([0, 2, 1]) / math.sqrt(size)
        scores = scores.reshape([self.heads, BLOCK, tokens]) + causal(block)
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

    def rows(self, layer: int, table: Sequence[int], h: Any) -> Any:
        """See `Shard`."""
        p, s, block = self.layers[layer], self.sizes, len(table) - 1
        q = (h @ p["q"]).reshape([BLOCK, self.heads, -1]).transpose([1, 0, 2])
        q = paddle.concat(
            [q[..., : s.nope] @ p["up_key"], self.rotary(q[..., s.nope :], block)], axis=-1
        )
        down = (h @ p["down"]).unsqueeze(0)
        own = paddle.concat(
            [norm(down[..., : s.latent]), self.rotary(down[..., s.latent :], block)], axis=-1
        )
        self.write(layer, table[-1], own)
        keys = self.gather(layer, table)[0]
        scores = (
            q.reshape([-1, s.latent + s.rope]) @ keys.transpose([1, 0]) / math.sqrt(s.nope + s.rope)
        )
        scores = scores.reshape([self.heads, BLOCK, -1]) + causal(block)
        weights = paddle.nn.functional.softmax(scores, axis=-1).reshape([self.heads * BLOCK, -1])
        seen = (weights @ keys[:, : s.latent]).reshape([self.heads, BLOCK, s.latent]) @ p[
            "up_value"
        ]
        return seen.transpose([1, 0, 2]).reshape([BLOCK, -1])


def make_shard(kind: str, seed: int, num_blocks: int, rank: int = 0, ranks: int = 1) -> Shard:
    """A rank's share of the model whose layout kvactors calls `kind`."""
    return {"gqa": GQAShard, "mla": MLAShard}[kind](kind, seed, num_blocks, rank, ranks)


class Here:
    """Attention of one rank, in this process."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def attend(self, layer: int, table: Sequence[int], x: np.ndarray) -> list[np.ndarray]:
        """See `Attention`."""
        return [self.shard.attend(layer, table, x)]

    def tamper(self, kind: str, blocks: Sequence[int]) -> None:
        """See `Attention`."""
        self.shard.tamper(kind, blocks)

    def digest(self, blocks: Sequence[int]) -> list[bytes]:
        """See `Attention`."""
        return [self.shard.digest(blocks)]


class Trunk:
    """The parts without a cache: embedding, feed-forward, head, and the sum over the ranks."""

    def __init__(self, seed: int, attention: Attention, sizes: Sizes = SIZES) -> None:
        weights, s = Weights(seed), sizes
        self.attention, self.sizes = attention, sizes
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

    def step(self, chunk: Chunk) -> np.ndarray | None:
        """A chunk's way through the model: the logits of the rows that were asked for. Belongs in a
        worker thread."""
        with paddle.no_grad():  # gradient mode is a thread's own
            return self._step(chunk)

    def _step(self, chunk: Chunk) -> np.ndarray | None:
        padded = np.zeros(BLOCK, np.int64)
        padded[: len(chunk.tokens)] = chunk.tokens
        x = self.embedding[padded]
        table = chunk.table[: chunk.block + 1]
        for layer, p in enumerate(self.layers):
            for part in self.attention.attend(layer, table, x):
                x = x + part
            h = norm(tensor(x))
            x = x + np.asarray(
                ((paddle.nn.functional.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]).numpy()
            )
        if chunk.rows is None:
            return None
        logits: np.ndarray = (norm(tensor(x)) @ self.head).numpy()
        return np.array(logits[chunk.rows])
