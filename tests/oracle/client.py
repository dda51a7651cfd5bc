"""A client of the engine: one request after another, each ended in one of the possible ways."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from kvactors import CacheAsleep, KVActorsError, Lease, LeaseEnded, NoRoom
from tests.support.batch import spoil, started

from .batched import Batched
from .model import Prompt, Scope
from .sharing import branch, draw_hints
from .world import World

T = TypeVar("T")

STEPS = 8
"""Steps of the loop after which a call is cancelled, at most."""


class Cut(Exception):
    """A call was cancelled by the client. It did not happen, or it ended the lease."""


class EngineFailed(Exception):
    """The engine fails in the middle of a request."""


class Client:
    """requests: still to be made, shared by all clients of a round."""

    def __init__(self, world: World, number: int, requests: list[int]) -> None:
        self.world = world
        self.rng = random.Random(f"client {world.drawn.seed} {number}")
        self.sharing_rng = random.Random(f"sharing {world.drawn.seed} {number}")
        self.batch_rng = random.Random(f"batch {world.drawn.seed} {number}")
        self.left: list[list[int]] = []  # tokens of batches that have ended
        self.requests = requests
        self.story: list[int] = []
        self.suspect: list[
            int
        ] = []  # the tokens of a lease if a cancelled extend was carried out nevertheless

    async def run(self) -> None:
        """Requests until none is left."""
        rng, world = self.rng, self.world
        while self.requests[0] > 0:
            self.requests[0] -= 1
            batched = self.batch_rng.random() < world.drawn.batches
            serve = Batched(self).serve if batched else self.serve_one
            if rng.random() >= world.drawn.cancelled:
                await serve()
                continue
            task = asyncio.get_running_loop().create_task(serve())
            if rng.random() < 0.7:
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(rng.random() * 0.01)
            if task.cancel():
                world.seen["request cancelled"] += 1
            await asyncio.gather(task, return_exceptions=True)
            del task  # the frames of its exception may refer to a lease that came too late

    async def serve_one(self) -> None:
        """One request. Its errors are noted."""
        world = self.world
        request = world.history.request()
        world.record.requests += 1
        try:
            await Request(self, request).run()
        except EngineFailed:
            pass
        except asyncio.CancelledError:
            raise
        except Exception as error:
            world.fail(f"a request raised {error!r}")
        finally:
            world.history.end(request)

    def tokens(self) -> list[int]:
        """Of a family that others share, or the next turn of this client's own story."""
        rng, drawn = self.rng, self.world.drawn
        size = drawn.block_size
        if self.suspect and rng.random() < 0.5:
            tokens, self.suspect = self.suspect, []
            if len(tokens) <= drawn.tables["device"]["num_blocks"] * size:
                return tokens
        if self.story and rng.random() < 0.3:
            self.story += [rng.randrange(1 << 32) for _ in range(rng.randint(1, 2 * size))]
            if len(self.story) <= drawn.longest * size:
                return list(self.story)
            self.story = []
        family = rng.randrange(drawn.families)
        length = max(1, rng.randint(1, drawn.longest) * size - rng.choice((0, 0, 1, size // 2)))
        tokens = [family * 10_000 + i for i in range(length)]
        if rng.random() < 0.4:
            fork, own = rng.randrange(length + 1), rng.randrange(4)
            tokens[fork:] = [family * 10_000 + 1000 * (own + 1) + i for i in range(fork, length)]
        if rng.random() < 0.1:
            self.story = tokens[:]
        return tokens

    def buffer(self, tokens: list[int]) -> Any:
        """Tokens in one of the forms a caller may have them in."""
        kind = self.rng.randrange(4)
        if kind == 0:
            return list(tokens)
        if kind == 1:
            return np.array(tokens, np.int64)
        return np.array(tokens, np.uint32) if kind == 2 else array("Q", tokens)

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Await a call. Some are cancelled by asyncio after a few steps of the loop, or by a
        time-out, which raises Cut."""
        rng, world = self.rng, self.world
        if rng.random() >= world.drawn.cut:
            return await make()
        if rng.random() < 0.3:
            try:
                async with asyncio.timeout(rng.choice((0.0, 0.0001, 0.001))):  # noqa: TID251
                    return await make()
            except TimeoutError:
                world.seen["call timed out"] += 1
                raise Cut from None
        task = asyncio.ensure_future(make())
        try:
            for _ in range(rng.randrange(STEPS)):
                await asyncio.sleep(0)
        finally:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            world.seen["call cancelled"] += 1
            raise Cut from None


class Request:
    """One request, from its prompt to its end."""

    def __init__(self, client: Client, number: int) -> None:
        self.client = client
        self.world = client.world
        self.rng = client.rng
        self.number = number
        self.cut = self.held = self.over = False
        self.until = 0
        self.written = False
        self.tail = b""  # the digest of the last block, which is not full
        self.hints = draw_hints(self.world, client.sharing_rng)
        self.prompt: Prompt
        self.lease: Lease
        rng, drawn = self.rng, self.world.drawn
        self.tokens = client.tokens()
        self.chunk: int | None = None
        self.salt, self.lora = (None, None)
        if drawn.scopes:
            self.salt, self.lora = rng.choice(
                (
                    (None, None),
                    (None, None),
                    ("salt-a", None),
                    ("salt-b", None),
                    (None, "lora"),
                    ("", None),
                )
            )
        self.media: tuple[Any, ...] = ()
        if drawn.media and rng.random() < 0.5:
            offset = rng.randrange(len(self.tokens))
            length = rng.randint(1, len(self.tokens) - offset)
            self.media = ((offset, length, rng.choice(("cat", "dog", b"cat", 7))),)

    async def run(self) -> None:
        """Admission, and again after a preemption."""
        world, rng = self.world, self.rng
        if rng.random() < 0.05:
            await self._prefetch()
        for _ in range(3):
            try:
                if not await self._attempt():
                    return
            finally:  # also when a call was cut in the very step in which its grant arrived
                world.leases -= self.held
                self.held = False

    async def _attempt(self) -> bool:
        """Admission and service once. Returns whether to try again."""
        world, rng = self.world, self.rng
        try:
            await self.client.call(self._acquire)
        except Cut:
            return False
        except KVActorsError as error:
            world.judge("acquire", error)
            await asyncio.sleep(rng.choice((0.0, 0.001)))
            return isinstance(error, NoRoom | CacheAsleep)
        return await self._serve()

    async def _prefetch(self) -> None:
        try:
            await self.world.cache.prefetch(
                list(self.tokens), extra_keys=self.media, salt=self.salt, lora=self.lora
            )
        except KVActorsError as error:
            self.world.judge("prefetch", error)

    async def _acquire(self) -> None:
        world, rng = self.world, self.rng
        buffer = self.client.buffer(self.tokens)
        self.until = world.history.snapshot()
        work = world.cache.acquire(
            f"request-{self.number}",
            buffer,
            extra_keys=self.media,
            salt=self.salt,
            lora=self.lora,
            hints=self.hints,
            chunk_tokens=self.chunk,
            deadline=rng.choice((0.05, 2.0, 2.0)),
        )
        if rng.random() < 0.2:
            task = await started(work)
            try:
                spoil(buffer)
                self.lease = await task
            finally:
                task.cancel()
        else:
            self.lease = await work
        self.held = True
        self.until = max(self.until, world.history.settled)  # also of a request in several turns
        world.leases += (
            1  # in the step in which the grant arrives: the weights are those of the admission
        )
        scope: Scope = world.scope(self.lora, self.salt)
        self.prompt = Prompt(world.drawn.block_size, scope, self.tokens, self.media)

    # -- with a lease

    async def _serve(self) -> bool:
        """Whether the request is to be admitted again."""
        world, rng, lease = self.world, self.rng, self.lease
        if rng.random() < world.drawn.forgotten:
            world.seen["lease forgotten"] += 1
            del self.lease
            return False
        try:
            async with lease:
                return await self._compute_and_end()
        except Cut:
            return False
        except KVActorsError as error:
            world.judge("a call on a lease", error, cut=self.cut)
            return False

    async def _compute_and_end(self) -> bool:
        world, rng, lease = self.world, self.rng, self.lease
        self._check_table()
        if rng.random() < 0.3:
            await self._layers()
        await self._ready()
        self._check_table()
        size = world.drawn.block_size
        cached = lease.cached_tokens // size
        if cached > self.prompt.full:
            world.fail(f"{cached} blocks cached of {self.prompt.full}")
        world.verify("hit", lease.block_table[:cached], self.prompt, self.until)
        world.seen["hits device"] += lease.hits.device
        world.seen["hits host"] += lease.hits.host
        world.seen["hits storage"] += lease.hits.storage
        self._write(cached)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.001)))
        await self._commit()
        for _ in range(0 if world.draining else rng.choice((0, 0, 1, 3))):
            await self.decode()
        if self.client.sharing_rng.random() < world.drawn.forks:
            await branch(self)
        if world.drawn.hostile and rng.random() < 0.3:
            await self._hostile()
        world.verify("held to the end", lease.block_table[: self.prompt.full], self.prompt, -1)
        return await self._end()

    async def _ready(self) -> None:
        try:
            await self.client.call(self.lease.wait_ready)
        except Cut:
            self.cut = True
            await self.lease.wait_ready()

    async def _layers(self) -> None:
        lease, world = self.lease, self.world
        for layer in range(world.drawn.tables["layout"]["num_layers"]):
            cached = await lease.wait_layer(layer) // world.drawn.block_size
            world.seen["layers"] += cached > 0
            world.verify("layer", lease.block_table[:cached], self.prompt, self.until, [layer])

    def _write(self, first: int) -> None:
        world, blocks = self.world, self.lease.block_table
        full = self.prompt.full
        world.memory.write(
            blocks[first:full], self.prompt.digests[first:full], world.history.stamp(self.number)
        )
        self.written, self.tail = True, b""
        if len(blocks) > full:
            self.tail = self.rng.randbytes(24)
            world.memory.write(blocks[full:], [self.tail] * (len(blocks) - full), 0)

    # -- forks

    def branch(self, lease: Lease) -> Request:
        """The request of a fork."""
        one = object.__new__(Request)
        vars(one).update(vars(self))
        one.lease, one.prompt, one.cut, one.over = lease, self.prompt.copy(), False, False
        return one

    def check_fork(self, parent: Request) -> None:
        """A fork has the full blocks of its parent and a copy of the last one."""
        full, mine, others = self.prompt.full, self.lease.block_table, parent.lease.block_table
        if tuple(mine[:full]) != tuple(others[:full]):
            self.world.fail("a fork has other full blocks than its parent")
        if len(mine) > full and mine[full] == others[full]:
            self.world.fail("a fork has the last block of its parent")
        self._check_table()
        self.check_bytes("forked")

    def check_bytes(self, when: str) -> None:
        """Every block holds its bytes, the last one included."""
        if self.over or self.lease.num_tokens != len(self.prompt.tokens):
            return
        world, full = self.world, self.prompt.full
        world.verify(when, self.lease.block_table[:full], self.prompt, -1)
        if self.tail:
            found = world.memory.read(self.lease.block_table[full : full + 1], [self.tail])
            world.seen["tails verified"] += 1
            if found != [0]:
                world.record.wrong += 1
                world.fail(f"{when}: the last block of a lease holds other bytes")

    async def finish(self) -> None:
        """End the request, perhaps with other hints, and note what is pinned since."""
        world, lease, prompt = self.world, self.lease, self.prompt
        hints = draw_hints(world, self.client.sharing_rng)
        epoch = world.pins.begin()
        await self.client.call(lambda: lease.finish(hints=hints))
        if lease.pinned_blocks:
            world.pins.add(epoch, prompt, lease.pinned_blocks)
        if not prompt.media and len(world.prompts) < 40:
            world.prompts.append(prompt.copy())

    async def _commit(self) -> None:
        total = len(self.prompt.tokens)
        computed = total if self.rng.random() < 0.7 else self.rng.randint(0, total)
        try:
            await self.client.call(lambda: self.lease.commit(computed))
        except Cut:
            self.cut = True
            await self.lease.commit(
                0
            )  # LeaseEnded if the call ended the lease: no block is its own
        if self.rng.random() < 0.1:
            await self.lease.commit(computed)  # a retried call

    async def decode(self) -> None:
        world, rng, lease = self.world, self.rng, self.lease
        before, first = len(self.prompt.tokens), self.prompt.full
        tokens = [rng.randrange(5) for _ in range(rng.randint(1, 2 * world.drawn.block_size))]
        buffer = self.client.buffer(tokens)
        try:
            if rng.random() < 0.3:
                task = await started(lease.extend(buffer))
                try:
                    spoil(buffer)
                    added = await task
                finally:
                    task.cancel()
            else:
                added = await self.client.call(lambda: lease.extend(buffer))
        except Cut:
            self.cut = True
            world.seen["extend cut"] += 1
            if lease.num_tokens != before:
                world.fail("a cancelled extend changed the lease")
            await lease.commit(0)  # LeaseEnded if the call ended the lease
            again = [rng.randrange(5) for _ in range(len(tokens))]  # the engine samples again
            self.client.suspect = self.prompt.tokens + tokens + again
            tokens = again
            added = await lease.extend(tokens)
        if tuple(lease.block_table[len(lease.block_table) - len(added) :]) != tuple(added):
            world.fail("extend returned other blocks than it appended")
        self.prompt.extend(tokens)
        self._check_table()
        self._write(first)
        await self._commit()

    def _check_table(self) -> None:
        lease, size = self.lease, self.world.drawn.block_size
        table = lease.block_table
        if lease.num_tokens != len(self.prompt.tokens) or len(table) != -(
            -lease.num_tokens // size
        ):
            self.world.fail(
                f"{len(table)} blocks for {lease.num_tokens} tokens, of {len(self.prompt.tokens)} "
                "given"
            )
        if len(set(table)) != len(table):
            self.world.fail("a block stands twice in one table")

    async def _hostile(self) -> None:
        """Arguments that no engine should pass. They are refused in the caller, and nothing else
        changes."""
        lease, cache, rng = self.lease, self.world.cache, self.rng
        total = lease.num_tokens
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("commit(float)", lambda: lease.commit(float(total))),
            ("commit(str)", lambda: lease.commit(str(total))),
            ("commit(None)", lambda: lease.commit(None)),
            ("commit(array)", lambda: lease.commit(np.array([total]))),
            ("commit(too many)", lambda: lease.commit(total + 1)),
            ("commit(-1)", lambda: lease.commit(-1)),
            ("preempt(float)", lambda: lease.preempt(float(total))),
            ("extend(negative)", lambda: lease.extend([-1])),
            ("extend(text)", lambda: lease.extend("text")),
            ("acquire(salt=5)", lambda: cache.acquire("hostile", [1, 2], salt=5)),
            ("acquire(lora=b)", lambda: cache.acquire("hostile", [1, 2], lora=b"x")),
            ("set_namespace(5)", lambda: cache.set_namespace(5)),
            ("acquire(deadline=text)", lambda: cache.acquire("hostile", [1], deadline="2")),
        ]
        name, make = rng.choice(calls)
        try:
            await make()
        except (TypeError, ValueError):
            self.world.seen[f"hostile {name}"] += 1
        except LeaseEnded:
            raise
        except KVActorsError as error:
            self.world.fail(f"{name} raised {error!r}")
        else:
            self.world.fail(f"{name} was accepted")

    async def _end(self) -> bool:
        lease, rng, world = self.lease, self.rng, self.world
        kind = rng.choices(("finish", "preempt", "abandon", "fail", "leave"), (10, 3, 1, 1, 2))[0]
        world.seen[f"end by {kind}"] += 1
        if kind == "finish":
            await self.finish()
            world.record.finished += 1
            if rng.random() < 0.1:
                try:
                    await lease.finish()
                except LeaseEnded:
                    return False
                world.fail("finish of a finished lease was accepted")
            return False
        if kind == "preempt":
            computed = rng.choice((0, len(self.prompt.tokens)))
            await self.client.call(lambda: lease.preempt(computed))
            return not world.draining and rng.random() < 0.5
        if kind == "abandon":
            lease.abandon()
        elif kind == "fail":
            raise EngineFailed
        return False
