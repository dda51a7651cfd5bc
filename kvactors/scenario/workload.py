"""The requests of a scenario: chat conversations and scripts."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache
from kvactors.checks import Media
from kvactors.errors import CacheAsleep, KVActorsError, LeasesOpen, NoRoom, Paused
from kvactors.scenario.engine import Engine, Model, ScenarioRequest
from kvactors.scenario.spec import ScenarioStep, Workload

VOCABULARY = 150_000
PLACEHOLDER = VOCABULARY
"""The token that stands for every part of an image."""


def random_tokens(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    """Tokens of a made-up text."""
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


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


REFUSALS = {NoRoom: "no_room", Paused: "paused", CacheAsleep: "asleep", LeasesOpen: "leases_open"}
PLAIN: dict[str, Callable[[KVCache], Awaitable[object]]] = {
    "clear": KVCache.clear,
    "pause": KVCache.pause,
    "resume": KVCache.resume,
    "settle": KVCache.wait_idle,
}


class Script:
    """Runs the steps of a script. An unexpected result is an error in the totals."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.seed = seed
        self.requests: dict[str, ScenarioRequest] = {}

    async def run(self, steps: tuple[ScenarioStep, ...]) -> None:
        """Run every step, in order. Leases left open at the end are finished."""
        for number, step in enumerate(steps, 1):
            fault = await self._fault_of(step)
            if fault:
                name = f"{step.do} {step.request}".strip()
                self.engine.totals.complain(f"step {number} ({name}): {fault}")
        for request in self.requests.values():
            await request.lease.finish()

    async def _fault_of(self, step: ScenarioStep) -> str:
        outcome = "ok"
        try:
            await self._step(step)
        except KeyError:
            return f"there is no lease of {step.request!r}"
        except (KVActorsError, ValueError) as error:
            refusals = [name for kind, name in REFUSALS.items() if isinstance(error, kind)]
            outcome = refusals[0] if refusals else f"{type(error).__name__}: {error}"
            self.engine.totals.no_room += outcome == "no_room"
        if outcome != step.expect:
            return f"{outcome}, expected {step.expect}"
        if step.cached_tokens >= 0 and outcome == "ok":
            cached = self.requests[step.request].lease.cached_tokens
            if cached != step.cached_tokens:
                return f"{cached} tokens cached, expected {step.cached_tokens}"
        return ""

    def _tokens(self, step: ScenarioStep) -> Any:
        return random_tokens(np.random.default_rng((self.seed, step.prompt)), step.tokens)

    async def _step(self, step: ScenarioStep) -> None:
        cache, engine = self.engine.cache, self.engine
        if step.do == "acquire":
            items = [(item.offset, item.length, item.hash) for item in step.media]
            lease = await cache.acquire(
                step.request, self._tokens(step), salt=step.salt, lora=step.lora, extra_keys=items
            )
            request = self.requests[step.request] = engine.request(lease)
            await engine.begin(request)
        elif step.do == "extend":
            await self.requests[step.request].lease.extend(self._tokens(step))
        elif step.do == "commit":
            request = self.requests[step.request]
            tokens = step.tokens or request.lease.num_tokens
            await request.compute(tokens)
            await request.lease.commit(tokens)
        elif step.do == "finish":
            await self.requests.pop(step.request).lease.finish()
        elif step.do == "preempt":
            await self.requests.pop(step.request).lease.preempt(step.tokens)
        elif step.do == "sleep":
            await cache.sleep(step.level)
        elif step.do == "wake":
            await cache.wake()
            engine.model = Model(cache.device)
        else:
            await PLAIN[step.do](cache)
