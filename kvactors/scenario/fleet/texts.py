"""Texts of a fleet's conversations, which the driver and every node make from the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.identity import hash_of_block
from kvactors.scenario.spec import Workload
from kvactors.scenario.workload import random_tokens


class Conversation:
    """A conversation that grows turn by turn behind the shared system prompt.

    Args:
        work: the workload.
        seed: of all texts.
        session: number of the conversation.
    """

    def __init__(self, work: Workload, seed: int, session: int) -> None:
        self._work = work
        self._rng = np.random.default_rng((seed, session))
        self._text = random_tokens(np.random.default_rng(seed), work.system_tokens)
        self._ends: list[tuple[int, int]] = []

    def turn(self, number: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The prompt and the answer of a turn, from 0 on."""
        while len(self._ends) <= number:
            question, answer = (
                random_tokens(self._rng, 1 + int(self._rng.poisson(mean)))
                for mean in (self._work.user_tokens, self._work.output_tokens)
            )
            end = len(self._text) + len(question)
            self._text = np.concatenate([self._text, question, answer])
            self._ends.append((end, len(self._text)))
        prompt, end = self._ends[number]
        return self._text[:prompt], self._text[prompt:end]


class Chain:
    """Block hashes of a text that grows.

    Args:
        root: see `CacheScope.root`.
        block_size: tokens of a block.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def of(self, tokens: NDArray[np.uint32]) -> Sequence[bytes]:
        """The hashes of the full blocks of a text, which begins with the text of the last call."""
        size, hashes = self._block_size, self._hashes
        for block in range(len(hashes), len(tokens) // size):
            parent = hashes[-1] if hashes else self._root
            piece = tokens[block * size : (block + 1) * size].astype("<u4").tobytes()
            hashes.append(hash_of_block(parent, piece))
        return hashes[: len(tokens) // size]
