"""The requests of a chat: conversations that grow turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.checks import Media
from kvactors.scenario.engine import Engine
from kvactors.scenario.spec import Workload
from kvactors.scenario.steps import VOCABULARY, random_tokens

PLACEHOLDER = VOCABULARY
"""The token that stands for every part of an image."""


class Speaker(NamedTuple):
    """The identity of a conversation, as numbers from 0 on of its text, its salt, its adapter and
    its images."""

    text: int
    tenant: int
    adapter: int
    images: int

    @classmethod
    def of(cls, session: int, work: Workload) -> Speaker:
        """The speaker of a conversation: neighbours differ in the tenant first, then in the
        adapter, then in the images."""
        rest, tenant = divmod(session, work.tenants)
        rest, adapter = divmod(rest, work.adapters)
        text, images = divmod(rest, work.images)
        return cls(text, tenant, adapter, images)

    @property
    def scope(self) -> dict[str, Any]:
        scope: dict[str, Any] = {"salt": f"tenant-{self.tenant}"} if self.tenant else {}
        return scope | (
            {"lora": f"adapter-{self.adapter}", "lora_id": self.adapter} if self.adapter else {}
        )

    def image_of(self, turn: int) -> str:
        """The hash of the image that a turn's question begins with."""
        return hashlib.sha256(f"{self.images}.{turn}".encode()).hexdigest()


class Conversation:
    """The text of a conversation that grows turn by turn behind the shared system prompt. A turn's
    prompt is the conversation so far and a new question, which begins with an image."""

    def __init__(self, work: Workload, seed: int, text: int) -> None:
        self._work = work
        self._rng = np.random.default_rng((seed, text))
        self._text = random_tokens(np.random.default_rng(seed), work.system_tokens)
        self._turns: list[tuple[int, int, int]] = []  # where its image, answer and end are

    def turn(self, number: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        image = np.full(self._work.image_tokens, PLACEHOLDER, np.uint32)
        while len(self._turns) <= number:
            question, answer = (
                random_tokens(self._rng, 1 + int(self._rng.poisson(mean)))
                for mean in (self._work.user_tokens, self._work.output_tokens)
            )
            begin = len(self._text)
            prompt = begin + len(image) + len(question)
            self._text = np.concatenate([self._text, image, question, answer])
            self._turns.append((begin, prompt, len(self._text)))
        _, prompt, end = self._turns[number]
        return self._text[:prompt], self._text[prompt:end]

    def media(self, number: int, speaker: Speaker) -> tuple[Media, ...]:
        """The images in the prompt of a turn that `turn` has made."""
        length = self._work.image_tokens
        begins = enumerate(self._turns[: number + 1]) if length else ()
        return tuple((begin, length, speaker.image_of(turn)) for turn, (begin, _, _) in begins)


async def serve_turn(
    work: Workload, turn: int, serve: Callable[[int, int], Awaitable[None]]
) -> None:
    """Serve one turn of every conversation, `work.concurrency` at once. serve: awaited with the
    numbers of the conversation and the turn."""

    async def client(sessions: Iterator[int]) -> None:
        for session in sessions:
            await serve(session, turn)

    sessions = iter(range(work.sessions))
    async with anyio.create_task_group() as tasks:
        for _ in range(min(work.concurrency, work.sessions)):
            tasks.start_soon(client, sessions)


async def chat(
    engine: Engine,
    work: Workload,
    seed: int,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Run conversations. Every conversation has its turn before any has its next, so each comes
    back when the others have pushed it down the tiers. before: awaited with the number of each turn
    (from 1 on) before the turn begins."""
    speakers = [Speaker.of(session, work) for session in range(work.sessions)]
    conversations = [Conversation(work, seed, speaker.text) for speaker in speakers]

    async def serve(session: int, turn: int) -> None:
        speaker, conversation = speakers[session], conversations[session]
        prompt, answer = conversation.turn(turn)
        await engine.serve_patiently(
            f"{session}.{turn}",
            prompt,
            answer,
            think=work.think,
            extra_keys=conversation.media(turn, speaker),
            **speaker.scope,
        )

    for turn in range(work.turns):
        if work.settle and turn:
            await engine.idle()
        if before is not None:
            await before(turn + 1)
        await serve_turn(work, turn, serve)
