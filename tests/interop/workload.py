"""Prompts of a case: conversations over shared prefixes, in the scopes and with the media that the
case is about."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

BLOCK = 16
"""Tokens of a block."""
PLACEHOLDER = 99_999
"""The token id in whose place a media item stands."""


class Item(NamedTuple):
    """A media item of a prompt. identifier: 64 hexadecimal digits, as engines name one."""

    offset: int
    length: int
    identifier: str


class Prompt(NamedTuple):
    """The arguments of a request."""

    tokens: tuple[int, ...]
    salt: str | None = None
    lora: str | None = None
    media: tuple[Item, ...] = ()

    @property
    def blocks(self) -> int:
        """Full blocks."""
        return len(self.tokens) // BLOCK

    @property
    def plain(self) -> bool:
        """Whether tokens alone identify it."""
        return self.salt is None and self.lora is None and not self.media

    def message(self) -> dict[str, Any]:
        """As it is sent to a worker."""
        return {"tokens": self.tokens, "salt": self.salt, "lora": self.lora, "media": self.media}

    def items_of(self, block: int) -> list[Item]:
        """The media items that overlap a block."""
        first, last = block * BLOCK, (block + 1) * BLOCK
        return [
            item for item in self.media if item.offset < last and item.offset + item.length > first
        ]


class Workload:
    """Draws prompts. salts, loras: the scopes that prompts are drawn from. images: different images
    that prompts show (0: none).

    The same tokens occur in every scope and with every image, so that a reader which mixes two of
    them gives a wrong answer.
    """

    def __init__(
        self,
        seed: int,
        *,
        salts: Sequence[str | None] = (None,),
        loras: Sequence[str | None] = (None,),
        images: int = 0,
        prefixes: int = 6,
    ) -> None:
        self._random = random.Random(seed)
        self._salts, self._loras = salts, loras
        self._images = [
            hashlib.sha256(f"image {seed} {i}".encode()).hexdigest() for i in range(images)
        ]
        self._prefixes = [self._tokens(self._random.randint(1, 6) * BLOCK) for _ in range(prefixes)]
        self._turns: list[tuple[int, ...]] = []
        self.drawn: list[Prompt] = []

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1_000, 50_000) for _ in range(count))

    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts to be requested."""
        made = [self._prompt() for _ in range(count)]
        self.drawn += made
        return made

    def _prompt(self) -> Prompt:
        draw = self._random
        further_turn = self._turns and draw.random() < 0.6
        begun = draw.choice(self._turns[-20:] if further_turn else self._prefixes)
        tokens = begun + self._tokens(draw.randint(1, 4 * BLOCK))
        if len(tokens) < 24 * BLOCK:
            self._turns.append(tokens)
        return self._shown(self._tail(tokens))

    def _tail(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A prompt never ends with a full block, so that no hit is given back for its last
        token."""
        return tokens if len(tokens) % BLOCK else (*tokens, 7)

    def _shown(self, tokens: tuple[int, ...]) -> Prompt:
        draw = self._random
        salt, lora = draw.choice(self._salts), draw.choice(self._loras)
        if not self._images or draw.random() < 0.2:
            return Prompt(tokens, salt, lora)
        # The place of an image depends on the conversation's first token, so that turns of one
        # conversation agree on it.
        place = random.Random(tokens[0])
        offset, length = place.randint(0, 40), place.randint(4, 40)
        if offset + length >= len(tokens):
            return Prompt(tokens, salt, lora)
        shown = (*tokens[:offset], *[PLACEHOLDER] * length, *tokens[offset + length :])
        return Prompt(shown, salt, lora, (Item(offset, length, draw.choice(self._images)),))

    def asked(self, count: int) -> list[Prompt]:
        """Prompts to ask an index about: requested ones, their beginnings, ones that leave them,
        ones in other scopes, and unknown ones."""
        draw, made = self._random, []
        for _ in range(count):
            kind, known = draw.random(), draw.choice(self.drawn)
            if kind < 0.4:
                made.append(known)
            elif kind < 0.6:
                made.append(
                    known._replace(tokens=self._tail(known.tokens + self._tokens(3 * BLOCK)))
                )
            elif kind < 0.8:
                at = draw.randint(0, len(known.tokens) - 1)
                made.append(
                    known._replace(
                        tokens=self._tail((*known.tokens[:at], 7, *known.tokens[at + 1 :]))
                    )
                )
            elif kind < 0.9:
                images = tuple(
                    item._replace(identifier=draw.choice(self._images)) for item in known.media
                )
                made.append(
                    known._replace(
                        salt=draw.choice(self._salts), lora=draw.choice(self._loras), media=images
                    )
                )
            else:
                made.append(known._replace(tokens=self._tail(self._tokens(len(known.tokens)))))
        return made
