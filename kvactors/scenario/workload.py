"""The requests of a scenario: chat conversations and scripts."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.checks import Media
from kvactors.errors import CacheAsleep, KVActorsError, LeasesOpen, NoRoom, Paused
from kvactors.scenario.engine import DeviceModel, Engine, ScenarioRequest
from kvactors.scenario.spec import ScenarioStep, Workload

VOCABULARY = 150_000
PLACEHOLDER = VOCABULARY
"""The token that stands for every part of an image."""


def random_tokens(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    """Tokens of a made-up text."""
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


class Speaker(NamedTuple):
    """The identity of a conversation, as numbers from 0 on."""

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
        """Salt and adapter, as `acquire` takes them."""
        scope: dict[str, Any] = {"salt": f"tenant-{self.tenant}"} if self.tenant else {}
        return scope | (
            {"lora": f"adapter-{self.adapter}", "lora_id": self.adapter} if self.adapter else {}
        )

    def image_of(self, turn: int) -> str:
        """The hash of the image that a turn's question begins with."""
        return hashlib.sha256(f"{self.images}.{turn}".encode()).hexdigest()


async def chat(
    engine: Engine,
    work: Workload,
    seed: int,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Run conversations that grow turn by turn. A turn's prompt is the conversation so far and a
    new question. Every conversation has its turn before any has its next, so each comes back when
    the others have pushed it down the tiers.
    """
    system = random_tokens(np.random.default_rng(seed), work.system_tokens)
    said = [system] * work.sessions
    speakers = [Speaker.of(session, work) for session in range(work.sessions)]
    texts = [np.random.default_rng((seed, speaker.text)) for speaker in speakers]
    media: list[list[Media]] = [[] for _ in speakers]

    async def client(sessions: Iterator[int], turn: int) -> None:
        for session in sessions:
            rng, speaker = texts[session], speakers[session]
            question = random_tokens(rng, 1 + int(rng.poisson(work.user_tokens)))
            answer = random_tokens(rng, 1 + int(rng.poisson(work.output_tokens)))
            image = np.full(work.image_tokens, PLACEHOLDER, np.uint32)
            if work.image_tokens:
                media[session].append(
                    (len(said[session]), work.image_tokens, speaker.image_of(turn))
                )
            prompt = np.concatenate([said[session], image, question])
            await engine.serve_patiently(
                f"{session}.{turn}",
                prompt,
                answer,
                think=work.think,
                extra_keys=tuple(media[session]),
                **speaker.scope,
            )
            said[session] = np.concatenate([prompt, answer])

    for turn in range(work.turns):
        if work.settle and turn:
            await engine.idle()
        if before is not None:
            await before(turn + 1)
        sessions = iter(range(work.sessions))
        async with anyio.create_task_group() as tasks:
            for _ in range(min(work.concurrency, work.sessions)):
                tasks.start_soon(client, sessions, turn)


class Script:
    """Runs the steps of a script. An unexpected result is an error in the totals."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.seed = seed
        self.requests: dict[str, ScenarioRequest] = {}

    async def run(self, steps: tuple[ScenarioStep, ...]) -> None:
        """Run every step, in order. Leases left open at the end are finished."""
        for number, step in enumerate(steps, 1):
            outcome = "ok"
            try:
                await self._step(step)
            except NoRoom:
                outcome = "no_room"
                self.engine.totals.no_room += 1
            except Paused:
                outcome = "paused"
            except CacheAsleep:
                outcome = "asleep"
            except LeasesOpen:
                outcome = "leases_open"
            except KeyError:
                self._complain(number, step, f"there is no lease of {step.request!r}")
                continue
            except (KVActorsError, ValueError) as error:
                outcome = f"{type(error).__name__}: {error}"
            if outcome != step.expect:
                self._complain(number, step, f"{outcome}, expected {step.expect}")
            elif step.cached_tokens >= 0 and outcome == "ok":
                cached = self.requests[step.request].lease.cached_tokens
                if cached != step.cached_tokens:
                    self._complain(
                        number, step, f"{cached} tokens cached, expected {step.cached_tokens}"
                    )
        for request in self.requests.values():
            await request.lease.finish()

    def _complain(self, number: int, step: ScenarioStep, what: str) -> None:
        self.engine.totals.complain(
            f"step {number} ({step.do}{step.request and ' ' + step.request}): {what}"
        )

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
            await request.compute()
            await request.lease.commit(step.tokens or request.lease.num_tokens)
        elif step.do == "finish":
            await self.requests.pop(step.request).lease.finish()
        elif step.do == "preempt":
            await self.requests.pop(step.request).lease.preempt(step.tokens)
        elif step.do == "clear":
            await cache.clear()
        elif step.do == "pause":
            await cache.pause()
        elif step.do == "resume":
            await cache.resume()
        elif step.do == "sleep":
            await cache.sleep(step.level)
        elif step.do == "wake":
            await cache.wake()
            engine.model = DeviceModel(cache.device)
        else:
            await cache.wait_idle()
