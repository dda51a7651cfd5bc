"""The client: requests one after another, and now and then an order to the whole cache."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from kvactors import CacheAsleep, DeadlineExceeded, Hints, KVActorsError, LeasesOpen
from kvactors.cache import AWAKE_LIMIT_S
from kvactors.checks import Media
from kvactors.errors import NumBlocksUnset, SleepUnsupported
from tests.load.batch import Batch, EngineFailed
from tests.load.calls import Cut, cut_soon, draw, passes
from tests.load.ground import SALTS, Ground, Prompt, Row

T = TypeVar("T")

LIMIT = 30.0
"""Seconds in which `resume` and `wake` must succeed."""

DRAINED = 20_000
"""Milliseconds in which all leases must end while the cache is paused."""


class Client:
    """One client.

    Args:
        ground: what it works on.
        name: of its random choices and its requests.
        more: whether it makes another request.
    """

    def __init__(self, ground: Ground, name: str, more: Callable[[], bool]) -> None:
        self.ground = ground
        self.name = name
        self.more = more
        self.rng = random.Random(name)
        self.story: list[int] = []  # of a conversation of many turns
        self.left: list[Prompt] = []  # to be requested again: of ended, preempted, refused requests
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """All of this client's work."""
        rng, ground = self.rng, self.ground
        while self.more():
            ordered = rng.random() < ground.mix.ordered
            work = self.order() if ordered else Batch(self).run()
            self.task = asyncio.get_running_loop().create_task(work, name=f"client {self.name}")
            # an order that is cancelled may be carried out later, when it is not expected any more
            if rng.random() < ground.mix.cancelled and (ground.faulty or not ordered):
                await (passes(rng) if rng.random() < 0.7 else asyncio.sleep(rng.random() * 0.01))
                ground.seen["request cancelled"] += self.task.cancel()
            (error,) = await asyncio.gather(self.task, return_exceptions=True)
            # the frames of an exception may refer to a lease that came too late
            self.task = None
            if isinstance(error, Exception) and not isinstance(
                error, KVActorsError | Cut | EngineFailed
            ):
                ground.fail(f"a request raised {error!r}")
            del error
            await asyncio.sleep(rng.choice(ground.moments))

    async def ask(
        self,
        what: str,
        make: Callable[[], Awaitable[T]],
        seconds: float,
        row: Row | None = None,
        *,
        cuts: bool = True,
    ) -> T:
        """Await one call of the cache, which may take `seconds`. The ground judges its error.

        Args:
            row: of the lease that is called.
            cuts: whether the client may cancel it.

        Raises:
            Cut: the client cancelled it.
        """
        ground, outcome = self.ground, "ok"
        began = ground.began(self)
        try:
            if cuts and self.rng.random() < ground.mix.cut:
                return await cut_soon(self.rng, make)
            return await make()
        except Cut:
            outcome = "cut"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except KVActorsError as error:
            outcome = type(error).__name__
            ground.judge(what, error, row)
            raise
        finally:
            ground.seen[f"outcome {what} {outcome}"] += 1
            ground.ended(self, what, outcome, seconds, began)

    # -- draws

    def prompt(self) -> Prompt:
        """One that was requested before, the next turn of this client's own story, or one of a
        family that others share."""
        rng, mix, size = self.rng, self.ground.mix, self.ground.cache.block_size
        most = mix.longest * size
        if self.left and rng.random() < 0.3:
            again = rng.choice(self.left)
            return again if len(again.tokens) <= most else Prompt(again.tokens[:most])
        if self.story and rng.random() < 0.3:
            self.story += [rng.randrange(1 << 32) for _ in range(rng.randint(1, 2 * size))]
            if len(self.story) <= most:
                return Prompt(list(self.story))
            self.story = []
        tokens = family_prompt(rng.randrange(mix.families), rng.randint(1, mix.longest) * size)
        del tokens[max(1, len(tokens) - rng.choice((0, 0, 1, size // 2))) :]
        length = len(tokens)
        if rng.random() < 0.4:  # a member of the family
            fork, own = rng.randrange(length + 1), rng.randrange(1, 5)
            tokens[fork:] = [one + 1000 * own for one in tokens[fork:]]
        if rng.random() < 0.1:
            self.story = tokens[:]
        salt = lora = None
        if rng.random() < mix.scopes:
            salt, lora = rng.choice((*((salt, None) for salt in SALTS), (None, "lora")))
        media: tuple[Media, ...] = ()
        if rng.random() < mix.media:
            offset = rng.randrange(length)
            count = rng.choice((1, rng.randint(1, length - offset)))
            media = ((offset, count, rng.choice(("picture", "film", b"picture", 7))),)
        return Prompt(tokens, media, salt, lora)

    def hints(self) -> Hints | None:
        """Hints of a request, None for some."""
        rng, mix = self.rng, self.ground.mix
        if rng.random() >= mix.hints:
            return None
        self.ground.seen["hints"] += 1
        pin = rng.random() < mix.pins
        ttl = rng.choice((None, None, 0.001, 0.02, 5.0))
        if pin:
            ttl = rng.choice((0.001, 0.02, None)) if mix.pins_end else None
        return Hints(
            priority=rng.choice((-2, -1, 0, 0, 1, 2)),
            ttl=ttl,
            pin=pin,
            session_ends=rng.random() < 0.1,
        )

    # -- orders to the whole cache

    async def order(self) -> None:
        """One of them, by weight. Clears, and those that need every request to end, come one at a
        time where the ground has it so."""
        ground = self.ground
        weights = ground.mix.orders
        if not weights or ground.closing:
            return
        kind = draw(self.rng, weights)
        work = {
            "clear": self.clear,
            "clear part": self._clear_part,
            "pause": self._pause,
            "namespace": self._namespace,
            "sleep": self._sleep,
            "prefetch": self._prefetch,
            "wait_idle": self._wait_idle,
            "quota": self._set_quota,
            "unpin": self._unpin,
            "check": self._check,
        }[kind]
        alone = ground.one_order and kind in ("clear", "clear part", "pause", "namespace", "sleep")
        if alone and ground.ordering:
            return
        ground.ordering |= alone
        try:
            await work()
        finally:
            ground.ordering &= not alone

    async def _ask(self, what: str, make: Callable[[], Awaitable[T]], seconds: float) -> T:
        return await self.ask(what, make, seconds, cuts=self.ground.faulty)

    async def clear(self, storage: bool | None = None) -> None:
        """Clear everything."""
        cache, ground = self.ground.cache, self.ground
        stored = self.rng.random() < 0.5 if storage is None else storage
        async with ground.clearing({}, storage=stored):
            await self._ask(
                "clear storage" if stored else "clear",
                lambda: cache.clear(storage=stored, deadline=ground.patience),
                ground.patience,
            )

    async def _clear_part(self) -> None:
        ground, cache, part = self.ground, self.ground.cache, draw_part(self.rng)
        stored = "salt" in part and ground.keeps_quotas and self.rng.random() < 0.5
        ground.seen["clear salt and storage"] += stored
        async with ground.clearing(part, storage=stored):
            await self._ask(
                f"clear {min(part)}",
                lambda: cache.clear(**part, storage=stored, deadline=ground.patience),
                ground.patience,
            )

    async def _pause(self) -> None:
        limit = self.rng.choice((0.02, 2.0))
        try:
            await self._paused(limit)
            await asyncio.sleep(self.rng.choice(self.ground.moments))
        finally:
            await self.resume()

    async def _paused(self, limit: float) -> None:
        cache = self.ground.cache
        await self._ask("pause", lambda: cache.pause(deadline=limit), limit)

    async def resume(self) -> None:
        """Resume, unless the cache closes or another client sends it to sleep."""
        if not self.ground.closing:
            with suppress(CacheAsleep):
                await self.ground.cache.resume(deadline=LIMIT)

    async def _drained(self) -> bool:
        """Wait until all leases have ended. The cache's own count has the leases whose `acquire`
        has been answered, and has not returned to its client yet."""
        for attempt in range(DRAINED):
            if not self.ground.cache.statistics().prefix.leases:
                return True
            if attempt % 100 == 99:
                gc.collect()  # forgotten leases in the cycle of an exception
            await asyncio.sleep(0.001)
        return False

    async def _namespace(self) -> None:
        """Change the weights, with which the engine computes what it admits from then on. An
        engine without faults lets its requests end first."""
        ground, cache, limit = self.ground, self.ground.cache, self.ground.patience
        name = self.rng.choice(("weights-0", "weights-1", "weights-2"))
        ground.draining += 1
        try:
            if ground.one_order:
                await self._paused(10.0)
                if not await self._drained():
                    ground.fail("leases do not end while the cache is paused")
                    return
            with ground.pins.changing():
                await self._ask(
                    "set_namespace", lambda: cache.set_namespace(name, deadline=limit), limit
                )
        finally:
            ground.draining -= 1
            await self.resume()

    async def _sleep(self) -> None:
        """Sleep and wake, mostly after a pause that lets leases end."""
        ground, rng = self.ground, self.rng
        level: Literal[1, 2] = rng.choice((1, 2))
        limit = rng.choice((0.05, 5.0))
        ground.draining += 1
        try:
            if rng.random() < 0.8:
                with suppress(DeadlineExceeded):
                    await self._paused(0.05)
                await self._drained()
            with ground.pins.ending({}):
                try:
                    await self._fall_asleep(level, limit)
                finally:
                    ground.draining -= 1
                    await self.wake()
        except (SleepUnsupported, LeasesOpen, CacheAsleep, NumBlocksUnset):
            ground.seen["sleep refused"] += 1

    async def _fall_asleep(self, level: Literal[1, 2], limit: float) -> None:
        cache, ground = self.ground.cache, self.ground
        await self.ask(
            "sleep", lambda: cache.sleep(level, deadline=limit), limit + 2 * AWAKE_LIMIT_S
        )
        ground.seen[f"slept {level}"] += 1
        for call in (cache.acquire("asleep", [1]), cache.clear(), cache.sleep()):
            try:
                await call
            except CacheAsleep:
                continue
            if ground.one_order:  # no other client can have woken it
                ground.fail("a call of a cache that sleeps was answered")

    async def wake(self) -> None:
        """Wake and resume. Another client may fall asleep or wake meanwhile."""
        ground, cache = self.ground, self.ground.cache
        while not ground.closing and (cache.system.asleep or cache.system.sizing is not None):
            with suppress(CacheAsleep):
                await cache.wake(deadline=LIMIT)
                break
            await asyncio.sleep(0.01)
        await self.resume()

    async def _prefetch(self) -> None:
        cache, one = self.ground.cache, self.prompt()
        await self._ask(
            "prefetch",
            lambda: cache.prefetch(one.tokens, extra_keys=one.media, deadline=1.0, **one.scope),
            1.0,
        )

    async def _wait_idle(self) -> None:
        cache, limit = self.ground.cache, self.rng.choice((0.01, 3.0))
        await self._ask("wait_idle", lambda: cache.wait_idle(limit), limit)

    async def _set_quota(self) -> None:
        """Change the quota of a salt in one tier, or in both."""
        cache, rng, ground = self.ground.cache, self.rng, self.ground
        device, host = (rng.choice((None, 1, 2, rng.randint(1, 64))) for _ in range(2))
        sizes = {"device": device, "host": host, "storage": device if ground.keeps_quotas else None}
        salt = rng.choice(SALTS)
        await self._ask("quota", lambda: cache.set_quota(salt, deadline=2.0, **sizes), 2.0)

    async def _unpin(self) -> None:
        """End a pin: a known one, or one that does not exist."""
        ground, cache = self.ground, self.ground.cache
        known = ground.pins.draw(self.rng)
        if known is None:
            await self._ask("unpin", lambda: cache.unpin([1, 2, 3], deadline=2.0), 2.0)
            return
        key, one = known
        with ground.pins.ending({}, only=key):
            epoch = ground.pins.epoch
            blocks = await self._ask(
                "unpin", lambda: cache.unpin(one.tokens, deadline=2.0, **one.scope), 2.0
            )
            # A clear may have ended it first, or another namespace has no such pin.
            alone = ground.pins.epoch == epoch and cache.namespace == key[0]
        ground.seen["unpinned"] += blocks > 0
        if not blocks and alone and not ground.faulty:
            ground.fail("unpin of pinned blocks found none")

    async def _check(self) -> None:
        """Invariants hold under load."""
        ground = self.ground
        if ground.faulty:
            return
        if problems := ground.cache.check():
            ground.fail(f"check under load: {problems[:3]}")
        ground.pins.check()


def family_prompt(family: int, length: int) -> list[int]:
    """The first tokens of a family."""
    return [family * 10_000 + i for i in range(length)]


def draw_part(rng: random.Random) -> dict[str, Any]:
    """A salt, or the adapter."""
    return rng.choice((*({"salt": salt} for salt in SALTS), {"lora": "lora"}))


async def compare_clears(ground: Ground, rng: random.Random) -> None:
    """At rest: after the clear of a part none of its blocks is found, and all others are."""
    cache = ground.cache
    prompts = [one for namespace, one in ground.prompts if namespace == cache.namespace]

    def found() -> Sequence[tuple[int, int]]:
        hits = [cache.lookup([*one.tokens, 1], **one.scope) for one in prompts]
        return [(one.device, one.host) for one in hits]

    part = draw_part(rng)
    await cache.wait_idle(60.0)
    before = found()
    async with ground.clearing(part, storage=False):
        await cache.clear(**part, deadline=LIMIT)
    await cache.wait_idle(60.0)
    for one, was, now in zip(prompts, before, found(), strict=True):
        if one.is_in(part):
            ground.seen[f"clear {min(part)} compared"] += 1
            if any(now):
                ground.fail(f"{now} blocks of {part} are found after its clear")
        elif was != now:
            ground.fail(f"the clear of {part} changed {was} blocks to {now}")


async def serve_all(ground: Ground, name: str) -> None:
    """The longest prompt of every family is served, whole, after all faults."""
    client = Client(ground, name, lambda: False)
    for family in range(ground.mix.families):
        prompt = Prompt(family_prompt(family, ground.mix.longest * ground.cache.block_size))
        await Batch(client).serve(prompt, wait_for_room=True)
