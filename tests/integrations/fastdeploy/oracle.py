"""The bytes of every token of every layer, written and compared without kvactors' code."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvactors.integrations.fastdeploy.lower_tiers import ROLES
from kvactors.layout import Layout, Role

WORD = 8
"""Bytes of a token in a tensor: one number."""


class ModelLayout(Layout):
    """The layout of a `ModelMemory`, by the beginnings of its tensors' names."""

    kind = "model"

    def __init__(self, block_size: int, num_layers: int, extra_layers: int, stems: Any) -> None:
        self.stems = stems
        super().__init__(block_size, num_layers, extra_layers=extra_layers)

    def roles(self, layer: int) -> list[Role]:
        return [Role(ROLES[stem], (1, self.block_size, WORD), "uint8") for stem in self.stems]

    @classmethod
    def from_settings(cls, settings: Any, block_size: int) -> ModelLayout:
        layers = settings["num_layers"], settings["extra_layers"]
        return cls(block_size, *layers, settings["stems"])


GARBAGE = 0xDEAD
"""In place of all bytes of a memory that is lost."""


def seeds_of(request: Any) -> list[int]:
    """A number for each token, which stands for the tokens and media up to it."""
    media: dict[int, list[Any]] = {}
    inputs = request.multimodal_inputs
    for place, digest in zip(
        inputs.get("mm_positions", ()), inputs.get("mm_hashes", ()), strict=True
    ):
        for token in range(place.offset, place.offset + place.length):
            media.setdefault(token, []).append((token - place.offset, digest))
    running, seeds = hashlib.sha256(), []
    for position, token in enumerate(request.tokens):
        running.update(f"{int(token)}:{media.get(position)};".encode())
        seeds.append(int.from_bytes(running.copy().digest()[:WORD], "little") | 1)
    return seeds


class ModelMemory:
    """The cache tensors of all ranks, and a model that fills them.

    Args:
        num_blocks: rows of each tensor.
        block_size: tokens of a block.
        ranks, layers: their numbers.
        roles: beginnings of the tensors' names.
        make: makes one tensor of zeros from its shape (uint8).
        view: gives a writable numpy view of a tensor.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        ranks: int = 1,
        layers: int = 2,
        roles: Sequence[str] = ("key_caches", "value_caches"),
        make: Any = lambda shape: np.zeros(shape, np.uint8),
        view: Any = lambda tensor: tensor,
    ) -> None:
        self.block_size = block_size
        self.tensors: dict[str, Any] = {}
        self._words: list[tuple[Any, int]] = []
        self._weights = 0
        for rank in range(ranks):
            for layer in range(layers):
                for role in roles:
                    name = f"{role}_{layer}_rank{rank}.device{rank}"
                    tensor = make((num_blocks, 1, block_size, WORD))
                    self.tensors[name] = tensor
                    words = view(tensor).reshape(num_blocks, -1).view(np.uint64)
                    factor = int.from_bytes(hashlib.sha256(name.encode()).digest()[:WORD], "little")
                    self._words.append((words, factor | 1))

    def lose(self, weights: int = 0) -> None:
        """All bytes are others, and what the model computes from now on is that of its weights."""
        self._weights = weights
        for words, _ in self._words:
            words[:] = GARBAGE

    def _expected(self, seeds: Sequence[int], factor: int) -> Any:
        factor += 2 * self._weights  # odd
        return np.array([seed * factor % (1 << 64) for seed in seeds], np.uint64)

    def compute(self, seeds: Sequence[int], table: Sequence[int], start: int, stop: int) -> None:
        """The model computes tokens [start, stop) of a request."""
        places = [(table[i // self.block_size], i % self.block_size) for i in range(start, stop)]
        if places:
            rows, columns = zip(*places, strict=True)
            for words, factor in self._words:
                words[list(rows), list(columns)] = self._expected(seeds[start:stop], factor)

    def wrong(self, seeds: Sequence[int], table: Sequence[int], stop: int) -> list[int]:
        """The tokens of [0, stop) whose bytes are not those that the model computes."""
        if not stop:
            return []
        rows = [table[i // self.block_size] for i in range(stop)]
        columns = [i % self.block_size for i in range(stop)]
        bad: set[int] = set()
        for words, factor in self._words:
            found = words[rows, columns] != self._expected(seeds[:stop], factor)
            bad |= set(np.flatnonzero(found).tolist())
        return sorted(bad)
