"""The work of clients: requests with shared prefixes and many turns, ended in every possible way,
and orders to the whole cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvactors.cache import AWAKE_LIMIT_S
from kvactors.checks import Media
from kvactors.errors import (
    ActorFailed,
    CacheAsleep,
    DeadlineExceeded,
    DeviceError,
    KVActorsError,
    LeaseEnded,
    LeasesOpen,
    NoRoom,
    NumBlocksUnset,
    RankLost,
    SleepUnsupported,
    TokensCommitted,
)
from kvactors.lease import Lease
from kvactors.prefix_index.loads import LATE_LOAD_S
from kvactors.prefix_index.work import turn_blocks_of
from kvactors.scenario.engine import ScenarioRequest
from kvactors.types import HASH_BYTES
from tests.simulation.batched import Batched
from tests.simulation.client import CacheClient
from tests.simulation.draw import BLOCK
from tests.simulation.sharing import SALTS, draw_hints
from tests.simulation.world import World

LONG = 8.0
"""Seconds for an await whose end another deadline decides."""

DOUBT = 8.0
"""Seconds in which the loss of a rank must have been detected."""


class Prompt(NamedTuple):
    """Tokens, and the other parts of their identity."""

    tokens: list[int]
    salt: str | None = None
    lora: str | None = None
    media: tuple[Media, ...] = ()


class Client(CacheClient):
    """Requests one after another, and now and then another operation."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.story: list[int] = []  # of a conversation of many turns
        # Apart from `rng`, so that new operations leave the other draws of a seed as they are.
        self.api_rng = random.Random(world.drawn.seed * 2003 + number)
        self.extra_rng = random.Random(world.drawn.seed * 3001 + number)
        self.batch_rng = random.Random(world.drawn.seed * 6007 + number)
        self.left: list[list[int]] = []  # tokens of batches that have ended
        self.requests = self.answered = 0

    async def run(self) -> None:
        """All of this client's work."""
        for _ in range(self.world.drawn.requests):
            if self.batch_rng.random() < self.world.drawn.extra.batches:
                work = Batched(self).run()
            else:
                work = self.request() if self.rng.random() < 0.85 else self.order()
            self.task = asyncio.get_running_loop().create_task(work, name=f"client {self.number}")
            results = await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
            error = results[0]
            if isinstance(error, Exception) and not isinstance(error, KVActorsError):
                self.world.violated(f"a request raised {error!r}")
            del results, error
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.01)))

    # -- orders to the whole cache

    async def order(self) -> None:
        """One of them."""
        cache, rng = self.world.cache, self.rng
        extra = self.world.drawn.extra
        if extra.sleeps and self.extra_rng.random() < extra.sleeps:
            await self._sleep()
            return
        if extra.orders and self.extra_rng.random() < extra.orders:
            await self._share()
            return
        kind = rng.choice(
            ("clear", "clear", "pause", "namespace", "prefetch", "prefetch", "wait_idle")
        )
        if kind == "clear":
            storage = rng.random() < 0.5
            await self.ask(
                "clear storage" if storage else "clear",
                lambda: cache.clear(storage=storage, deadline=2.0),
                2.0,
            )
        elif kind == "namespace":
            name = rng.choice(("default", "default", "other"))
            await self.ask("set_namespace", lambda: cache.set_namespace(name, deadline=2.0), 2.0)
        elif kind == "prefetch":
            tokens = self.prompt().tokens
            await self.ask("prefetch", lambda: cache.prefetch(tokens, deadline=1.0), 1.0)
        elif kind == "wait_idle":
            limit = rng.choice((0.01, 3.0))
            await self.ask("wait_idle", lambda: cache.wait_idle(limit), limit)
        else:
            await self._pause()

    async def _sleep(self) -> None:
        """Sleep once no lease is open, and wake, also after a failure or a cancellation."""
        cache, rng, level = self.world.cache, self.extra_rng, self.extra_rng.choice((1, 2))
        held = rng.random() < 0.7  # else leases end while others begin
        try:
            if held:
                with suppress(DeadlineExceeded):
                    await cache.pause(deadline=0.02)
            for _ in range(40):
                with suppress(LeasesOpen):
                    limit = rng.choice((0.05, 1.0))
                    self.cut()
                    await self.ask(
                        "sleep",
                        lambda: cache.sleep(level, deadline=limit),  # noqa: B023
                        limit + 2 * AWAKE_LIMIT_S,
                    )
                    self.world.seen[f"slept {level}"] += 1
                    break
                await asyncio.sleep(0.02)
            await asyncio.sleep(rng.choice((0.0, 0.05)))
        except (SleepUnsupported, DeadlineExceeded, CacheAsleep, NumBlocksUnset, ActorFailed):
            self.world.seen["sleep refused"] += 1
        finally:
            for _ in range(20):
                if self.world.closing:
                    break
                try:
                    await cache.wake(deadline=5.0)
                    break
                except CacheAsleep:  # another client falls asleep or wakes
                    await asyncio.sleep(0.05)
            if held and not self.world.closing:
                with suppress(CacheAsleep):
                    await cache.resume(deadline=5.0)

    def cut(self) -> None:
        """Cancel this client's task soon, in some runs."""
        rng, extra = self.extra_rng, self.world.drawn.extra
        if extra.cut and self.task is not None and rng.random() < extra.cut:
            self.world.seen["fork or sleep cut"] += 1
            asyncio.get_running_loop().call_later(rng.random() * 0.02, self.task.cancel)

    async def _share(self) -> None:
        """A quota, the end of a pin, or the clear of a salt or an adapter."""
        cache, rng = self.world.cache, self.extra_rng
        kind = rng.choice(("unpin", "set_quota", "clear salt", "clear lora"))
        salt = rng.choice(SALTS)
        if kind == "unpin":
            pins = list(self.world.pinned)
            if not pins:
                return
            tokens, of, lora = rng.choice(pins)
            blocks = await self.ask(
                kind, lambda: cache.unpin(tokens, salt=of, lora=lora, deadline=2.0), 2.0
            )
            self.world.seen["unpinned"] += blocks > 0
        elif kind == "set_quota":
            sizes = [rng.choice((None, 1, 2, rng.randint(1, 64))) for _ in range(2)]
            store = self.world.system.store
            kept = sizes[0] if store is not None and store.shares is not None else None
            await self.ask(
                kind,
                lambda: cache.set_quota(
                    salt, device=sizes[0], host=sizes[1], storage=kept, deadline=2.0
                ),
                2.0,
            )
        elif kind == "clear salt":
            await self.ask(kind, lambda: cache.clear(salt=salt, deadline=2.0), 2.0)
        else:
            await self.ask(kind, lambda: cache.clear(lora="lora", deadline=2.0), 2.0)

    async def _pause(self) -> None:
        cache = self.world.cache
        try:
            limit = self.rng.choice((0.02, 2.0))
            await self.ask("pause", lambda: cache.pause(deadline=limit), limit)
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.3)))
        finally:
            if not self.world.closing:
                await cache.resume(deadline=5.0)

    # -- requests

    def prompt(self) -> Prompt:
        """Of a family that others share, or the next turn of this client's own story."""
        rng, drawn = self.rng, self.world.drawn
        if self.story and rng.random() < 0.4:
            grown = self.story + [rng.randrange(1 << 32) for _ in range(rng.randint(1, 2 * BLOCK))]
            self.story = grown if len(grown) <= drawn.longest * BLOCK else []
            if self.story:
                return Prompt(list(self.story))
        family, blocks = rng.randrange(drawn.families), rng.randint(1, drawn.longest)
        length = max(1, blocks * BLOCK - rng.choice((0, 0, 1, 3)))
        tokens = [family * 10_000 + i for i in range(length)]
        if rng.random() < 0.4:
            fork, own = rng.randrange(length + 1), rng.randrange(3)
            tokens[fork:] = [family * 10_000 + 1_000 * (own + 1) + i for i in range(fork, length)]
        if rng.random() < 0.15:
            self.story = tokens[:]
        salt, lora = rng.choice(((None, None),) * 8 + (("salt", None), (None, "lora")))
        if self.world.drawn.extra.orders:
            salt = self.extra_rng.choice((None, salt, *SALTS))
        media: tuple[Media, ...] = (
            ((rng.randrange(length), 1, rng.choice(("picture", "film"))),)
            if rng.random() < 0.1
            else ()
        )
        return Prompt(tokens, salt, lora, media)

    async def judge_wrong(self, lease: Lease, what: str) -> None:
        """Wrong bytes are a violation, unless a rank lost its memory and the cache reports it
        before the lease is used."""
        world = self.world
        gone = any(rank.serving is None or rank.starts > 1 for rank in world.ranks)
        for _ in range(int(DOUBT / 0.1) if gone else 0):
            await asyncio.sleep(0.1)
            try:
                await lease.commit(0, deadline=2.0)
            except RankLost:
                world.seen["lease ready to lost"] += 1
                raise
            except NoRoom:
                break
        world.violated(f"wrong bytes: {what}")

    async def request(self) -> None:
        """Serve a prompt until its request has ended, and resume it after each preemption."""
        prompt = self.prompt()
        self.requests += 1
        for _ in range(3):
            if await self._serve(prompt):
                self.answered += 1
                return
            await asyncio.sleep(self.rng.choice((0.0, 0.005)))

    def look(self, prompt: Prompt) -> None:
        """Look a prompt up: nothing changes by it, and what it finds is in bounds."""
        cache, world = self.world.cache, self.world
        prefix, before = world.system.index_actor, cache.free_blocks()
        tree = prefix.index.tree.statistics()
        hits = cache.lookup(
            prompt.tokens, extra_keys=prompt.media, salt=prompt.salt, lora=prompt.lora
        )
        if cache.free_blocks() != before or prefix.index.tree.statistics() != tree:
            world.violated("a look-up changed the index")
        full = len(prompt.tokens) // BLOCK
        if not (hits.blocks <= full and 0 <= hits.new_blocks <= full + 1 - hits.device):
            world.violated(f"a look-up found {hits} of {full} blocks")
        if before.free + before.evictable > before.total or min(before) < 0:
            world.violated(f"free blocks do not add up: {before}")
        world.seen["looked up"] += 1
        world.seen["looked up with hits"] += hits.blocks > 0

    async def _serve(self, prompt: Prompt) -> bool:
        """Serve one lease. Returns whether the request is over."""
        rng, cache = self.rng, self.world.cache
        deadline = rng.choice((0.02, 0.2, 1.0, 3.0))
        wait, incarnation = rng.random() < 0.9, self.world.system.index.incarnation
        space = self.api_rng.random() < self.world.drawn.extra.waits
        chunk = self.api_rng.choice((None, None, None, 1, BLOCK, 2 * BLOCK + 1))
        if self.api_rng.random() < 0.2:
            self.look(prompt)
        hints = draw_hints(self.world, self.extra_rng)
        lease = await self.ask(
            "acquire",
            lambda: cache.acquire(
                f"{self.number}",
                prompt.tokens,
                extra_keys=prompt.media,
                salt=prompt.salt,
                lora=prompt.lora,
                deadline=deadline,
                wait_for_evictions=wait,
                wait_for_room=space,
                chunk_tokens=chunk,
                hints=hints,
            ),
            deadline,
            fits=len(prompt.tokens) <= cache.config.device.num_blocks * BLOCK,
            space=space,
        )
        if rng.random() < 0.04:
            self.world.seen["lease granted to forgotten"] += 1
            return True
        async with lease:
            served = Served(self, lease, deadline, incarnation, prompt)
            if not await served.prefill():
                return True
            forks = self.world.drawn.extra.forks
            if forks and self.extra_rng.random() < forks:
                await served.fork()
            for _ in range(rng.choice((0, 0, 1, 2))):
                await rng.choice((served.decode, served.speculate))()
            return await served.end()


class WholeRequest(ScenarioRequest):
    """A request whose last block, which is not full and has no hash, has contents too. tail: their
    name, empty if they have not been computed."""

    tail = b""

    async def compute(self) -> None:
        self.tail = b""
        await super().compute()

    def truncated(self) -> None:
        """Tokens were dropped, and with them the contents of their blocks."""
        self.known, self.tail = min(self.known, self.full), b""

    async def compute_tail(self, name: bytes) -> None:
        """Compute the last block with the contents of that name."""
        self.tail = name
        await self._model.fill(self.lease.block_table[self.known : self.known + 1], name)

    async def verify_all(self) -> Sequence[int]:
        """Compare the known blocks and the last one with their contents."""
        names = self.lease.hashes(0, self.known) + self.tail
        return await self._model.check(self.lease.block_table[: len(names) // HASH_BYTES], names)


class Served:
    """One request of the reference engine, with random pauses, checks of every block between them,
    and calls that may be cancelled. incarnation: of the index that gave the lease. An engine detects
    the failure of that index at once, and leaves the blocks alone, which have other owners then."""

    def __init__(
        self, client: Client, lease: Lease, deadline: float, incarnation: int, prompt: Prompt
    ) -> None:
        self.client = client
        self.prompt = prompt
        self.incarnation = incarnation
        self.world = client.world
        self.rng = client.rng
        self.lease = lease
        self.by = asyncio.get_running_loop().time() + deadline
        self.request = WholeRequest(lease, BLOCK, self.world.model)
        self.committed = 0  # tokens

    async def prefill(self) -> bool:
        """Wait for the loads, check their blocks, compute the rest. False if the request was ended
        instead."""
        lease, client = self.lease, self.client
        if lease.pending and self.rng.random() < 0.5:
            await self._layers()
        if lease.pending and self.rng.random() < 0.05:
            self.world.seen["lease loading to ended"] += 1
            lease.abandon()
            return False
        rest = max(0.0, self.by - asyncio.get_running_loop().time()) + LATE_LOAD_S
        await client.ask("wait_ready", lambda: lease.wait_ready(deadline=LONG), rest)
        if len(set(lease.block_table)) < len(lease.block_table):
            self.world.violated("a block stands twice in a table")
        self.request.landed()
        await self.verify("served as cached")
        while lease.covered_tokens < lease.num_tokens:
            await self._chunk()
        await self._compute()
        return True

    async def fork(self, depth: int = 0) -> None:
        """Branches with separate bytes, which end in any order."""
        lease, rng, world = self.lease, self.client.extra_rng, self.world
        count, deadline = rng.choice((1, 1, 2)), rng.choice((0.05, 1.0))
        room = self.client.api_rng.random() < world.drawn.extra.waits
        self.client.cut()
        try:
            made = await self.client.ask(
                "fork",
                lambda: lease.fork_many(count, wait_for_room=room, deadline=deadline),
                deadline,
            )
        except (NoRoom, DeviceError):
            return
        world.seen["forked"] += count
        world.seen["forks of a fork"] += count * (depth > 0)
        branches: list[Served] = []
        try:
            for one in made:
                branch = Served(self.client, one, deadline, self.incarnation, self.prompt)
                branch.request.known, branch.request.tail = self.request.known, self.request.tail
                branches.append(branch)
                await branch.verify("forked")
            await self.verify("forked from")
            for branch in branches:
                tokens = [rng.randrange(3) for _ in range(rng.randint(1, BLOCK + 1))]
                with suppress(NoRoom, DeadlineExceeded):
                    await branch.lease.extend(tokens, deadline=deadline)
                    await branch._compute()
                    world.seen["branch computed"] += 1
                    if depth < 2 and rng.random() < 0.3:
                        await branch.fork(depth + 1)
            await self.verify("beside branches")
            for branch in branches:
                await branch.verify("of branches")
                if rng.random() < 0.5:
                    await branch.lease.finish(branch.lease.num_tokens, deadline=2.0)
        finally:
            for one in made:
                one.abandon()

    async def _chunk(self) -> None:
        """Compute the blocks of a chunk, and take those of the next one."""
        lease, request, rng = self.lease, self.request, self.client.api_rng
        first, covered = request.known, lease.covered_tokens // BLOCK
        if first < covered:
            request.known = covered
            hashes = lease.hashes(first, covered)
            await self.world.model.fill(lease.block_table[first:covered], hashes)
            await self.verify("computed as a chunk")
        before, deadline = lease.covered_tokens, rng.choice((0.05, 1.0))
        if rng.random() < 0.5:
            blocks = await self.client.ask(
                "commit", lambda: lease.commit(covered * BLOCK, deadline=2.0), 2.0
            )
            self.committed = blocks * BLOCK
        count = rng.randint(1, 3 * BLOCK)
        await self.client.ask(
            "next_chunk", lambda: lease.next_chunk(count, deadline=deadline), deadline
        )
        if lease.covered_tokens < min(lease.num_tokens, before + count):
            self.world.violated("a chunk is not covered")
        self.world.seen["next chunk"] += 1

    async def _layers(self) -> None:
        layout, lease = self.world.layout, self.lease
        for layer in range(layout.num_layers):
            rest = max(0.0, self.by - asyncio.get_running_loop().time()) + LATE_LOAD_S
            table = lease.block_table
            tokens = await self.client.ask(
                "wait_layer",
                lambda: lease.wait_layer(layer, deadline=LONG),  # noqa: B023
                rest,
            )
            if not lease.pending or self.world.ranks:
                continue
            blocks = tokens // BLOCK
            self.world.seen["lease layer checked"] += blocks > 0
            if self.world.model.check_layer(layer, table[:blocks], lease.hashes(0, blocks)):
                await self.client.judge_wrong(lease, f"layer {layer} was said to be there")

    async def _compute(self) -> None:
        """Run the model: it writes its blocks, also the last one that is not full, and reports
        them."""
        lease, rng = self.lease, self.rng
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05)))
        await self._still_ours()
        await self.request.compute()
        if len(lease.block_table) > self.request.full:
            mine = lease.request_id.encode().ljust(16, b"-") + rng.randbytes(16)
            await self.request.compute_tail(mine)
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01)))
        await self.verify("computed")
        computed = lease.num_tokens if rng.random() < 0.8 else rng.randint(0, lease.num_tokens)
        blocks = await self.client.ask("commit", lambda: lease.commit(computed, deadline=2.0), 2.0)
        self.committed = blocks * BLOCK

    async def decode(self) -> None:
        """Some more tokens."""
        lease, rng = self.lease, self.rng
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 2 * BLOCK))]
        deadline = rng.choice((0.05, 1.0))
        await self.client.ask("extend", lambda: lease.extend(tokens, deadline=deadline), deadline)
        await self._compute()

    async def speculate(self) -> None:
        """Drafts in reserved blocks, of which some are rejected, and tokens in their place."""
        lease, rng, ask = self.lease, self.rng, self.client.ask
        most = min(3 * BLOCK, turn_blocks_of(BLOCK) * BLOCK)
        count, deadline = rng.randint(0, most), rng.choice((0.05, 1.0))
        before = lease.num_tokens
        await ask("reserve", lambda: lease.reserve(count, deadline=deadline), deadline)
        drafts = [rng.randrange(4) for _ in range(rng.randint(0, 2 * BLOCK))]
        media: tuple[Media, ...] = ((len(drafts) - 1, 1, "still"),) if drafts else ()
        media = media if rng.random() < 0.3 else ()
        await ask(
            "extend", lambda: lease.extend(drafts, extra_keys=media, deadline=deadline), deadline
        )
        kept = rng.randint(before, lease.num_tokens) if rng.random() < 0.8 else self.committed
        await ask("truncate", lambda: lease.truncate(kept, deadline=2.0), 2.0)
        self.request.truncated()
        if len(lease.block_table) != -(-kept // BLOCK):
            self.world.violated(f"{len(lease.block_table)} blocks for {kept} tokens")
        if self.committed:
            await self._refused(lease, self.committed - 1)
        await self._compute()

    async def _refused(self, lease: Lease, kept: int) -> None:
        """Committed tokens stay."""
        try:
            await self.client.ask("truncate", lambda: lease.truncate(kept, deadline=2.0), 2.0)
        except TokensCommitted:
            return
        self.world.violated(f"tokens beyond {kept} were dropped, {self.committed} are committed")

    async def _still_ours(self) -> None:
        """LeaseEnded if the index of this lease has failed. The next incarnation must raise it too,
        for every call."""
        if self.world.system.index.incarnation == self.incarnation:
            return
        lease, what = self.lease, self.rng.choice(("commit", "extend", "preempt", "finish", ""))
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "commit": lambda: lease.commit(0, deadline=2.0),
            "extend": lambda: lease.extend([1], deadline=2.0),
            "preempt": lambda: lease.preempt(deadline=2.0),
            "finish": lambda: lease.finish(deadline=2.0),
        }
        if what:
            await self.client.ask(what, calls[what], 2.0)
            self.world.violated(f"{what} of a lease of a dead index was answered")
        raise LeaseEnded("the index of this lease has failed")

    async def verify(self, what: str) -> None:
        """Every block of the lease holds its bytes."""
        await self._still_ours()
        wrong = await self.request.verify_all()
        if wrong:
            await self.client.judge_wrong(
                self.lease,
                f"{what}, and {len(wrong)} of {self.request.known} blocks do not hold their bytes",
            )

    async def end(self) -> bool:
        """Finish, preempt, fail or abandon. Returns whether the request is over."""
        lease, rng, seen = self.lease, self.rng, self.world.seen
        kind: Any = rng.choices(("finish", "preempt", "abandon", "fail"), (12, 3, 1, 1))[0]
        await self.verify("held to the end")
        seen[f"lease ready to {kind}"] += 1
        if kind == "finish":
            hints = draw_hints(self.world, self.client.extra_rng)
            await self.client.ask("finish", lambda: lease.finish(hints=hints, deadline=3.0), 3.0)
            self._note_pin()
        elif kind == "preempt":
            computed = rng.choice((0, lease.num_tokens))
            await self.client.ask("preempt", lambda: lease.preempt(computed, deadline=3.0), 3.0)
            return rng.random() < 0.3
        elif kind == "abandon":
            lease.abandon()
        else:
            raise EngineFailed
        return True

    def _note_pin(self) -> None:
        """Remember what is pinned, for a later `unpin`."""
        lease, pins = self.lease, self.world.pinned
        if lease.pinned_blocks:
            self.world.seen["pinned"] += 1
            tokens, salt, lora = self.prompt.tokens, self.prompt.salt, self.prompt.lora
            pins.append((tokens[: lease.pinned_blocks * BLOCK], salt, lora))
            del pins[:-20]


class EngineFailed(KVActorsError):
    """The engine of a simulation fails in the middle of a request."""
