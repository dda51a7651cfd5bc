"""Requests that are served together, as an engine does: mostly one, else up to 64. Drawn operations
on their leases, each of which leaves every block with the bytes of its content, and drawn ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvactors import KVActorsError, Lease, LeaseEnded, NoRoom, Step
from kvactors.checks import Media
from kvactors.errors import DeadlineExceeded, DeviceError, NeverFits, NotReady, TokensCommitted
from kvactors.prefix_index.loads import LATE_LOAD_S
from kvactors.prefix_index.work import turn_blocks_of
from tests.load.calls import Cut, buffer_of, draw, spoiled
from tests.load.ground import Content, Prompt, Row, content_of, extended, named, truncated
from tests.load.steps import Beside, Call, Entry

if TYPE_CHECKING:
    from tests.load.client import Client

T = TypeVar("T")

SIZES = (2, 3, 8, 64)
"""Leases of a batch, if the device has blocks for them."""

OPERATIONS: dict[str, float] = {
    "step": 8,
    "extend": 4,
    "speculate": 3,
    "next_chunk": 4,
    "reserve": 1,
    "commit": 1,
    "pass": 1,
    "look": 1,
    "think": 4,
}
"""Operations of a batch and their weights. The ground's mix has those of forks and of bad
arguments."""

FORK, HOSTILE = 12, 2
"""Weights of these two where the mix has them in every request."""

ENTRIES = {"token": 10, "tokens": 10, "long": 2, "commit": 3, "none": 1, "uncovered": 4}
"""Entries of a step: `uncovered` commits tokens that a chunked lease has no blocks for."""

BESIDE = {
    "nothing": 8,
    "extend": 3,
    "truncate": 2,
    "step": 2,
    "reserve": 1,
    "commit": 1,
    "fork": 1,
    "finish": 1,
    "abandon": 1,
}
"""Calls on a lease of a step that has not returned."""

WHEN = ("before", "with", "with", "after")
"""When that call begins: before the step, in the same pass of the loop, or once the step has
begun."""

LIBRARY = ("kvactors/decode_batch.py", "kvactors/lease.py", "kvactors/lease.py")
"""Files whose coroutines may be tasks of a step."""

ENDS = {"finish": 10, "preempt": 3, "abandon": 1, "fail": 1, "leave": 2}

BAD: tuple[Callable[[Row], tuple[Any, ...]], ...] = (
    lambda row: ([1], len(row.tokens) + 2),
    lambda row: ([1], -1),
    lambda row: ([1], 1.0),
    lambda row: ("text",),
    lambda row: ([-1],),
)
"""Arguments for which a step raises in its caller, and changes nothing."""

REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "commit(float)": lambda _, lease: lease.commit(float(lease.num_tokens)),
    "commit(str)": lambda _, lease: lease.commit(str(lease.num_tokens)),
    "commit(None)": lambda _, lease: lease.commit(None),
    "commit(array)": lambda _, lease: lease.commit(np.array([lease.num_tokens])),
    "commit(too many)": lambda _, lease: lease.commit(lease.num_tokens + 1),
    "commit(-1)": lambda _, lease: lease.commit(-1),
    "preempt(float)": lambda _, lease: lease.preempt(float(lease.num_tokens)),
    "extend(negative)": lambda _, lease: lease.extend([-1]),
    "extend(text)": lambda _, lease: lease.extend("text"),
    "acquire(salt=5)": lambda cache, _: cache.acquire("hostile", [1, 2], salt=5),
    "acquire(lora=b)": lambda cache, _: cache.acquire("hostile", [1, 2], lora=b"x"),
    "set_namespace(5)": lambda cache, _: cache.set_namespace(5),
    "acquire(deadline=text)": lambda cache, _: cache.acquire("hostile", [1], deadline="2"),
}
"""Calls that no engine should make: they are refused in the caller, and nothing changes."""


class EngineFailed(Exception):
    """The engine fails in the middle of a request."""


class Batch:
    """Requests of a client, each of which ends in a drawn way."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ground = client.ground
        self.cache = client.ground.cache
        self.rng = client.rng
        self.seen = client.ground.seen
        self.fail = client.ground.fail
        self.size = self.cache.block_size
        self.cuts = True
        self.has_states = any(one.kind == "state" for one in self.cache.config.cache.groups)
        self.rows: list[Row] = []
        self.ended: list[Row] = []
        self.tickets: list[Any] = []

    def judge(self, what: str, error: KVActorsError, row: Row | None = None) -> None:
        """See `Ground.judge`."""
        self.ground.judge(f"{what} of a batch", error, row)

    # -- from admission to the end

    async def run(self) -> None:
        """Admit, operate, end."""
        rng, ground = self.rng, self.ground
        size = rng.choice(SIZES) if rng.random() < ground.mix.batches else 1
        spare = rng.choice((0, 0, 4, self.cache.device.num_blocks // 2))
        try:
            while len(self.rows) < size and not ground.draining:
                if self.rows and self.cache.free_blocks().available <= spare:
                    break
                try:
                    await self._admit()
                except NoRoom:
                    break
            for _ in range(rng.choice((0, 1, 2, 4, 8)) if size == 1 else rng.choice((2, 4, 8))):
                if self.rows and not ground.draining:
                    await self._operate()
            while self.rows:
                await self._end(self.rows[-1])
        finally:
            self._leave()

    async def serve(self, prompt: Prompt, seconds: float = 60.0, **options: Any) -> Lease:
        """Serve one prompt, whole, without drawn operations. Returns its ended lease."""
        self.cuts = False
        try:
            row = await self._acquire(prompt, seconds, options)
            await self._ready(row, seconds)
            await self.compute(row)
            lease, total = row.lease, len(row.tokens)
            await self.ask("commit", lambda: lease.commit(total, deadline=seconds), seconds, row)
            await self.ask("finish", lambda: lease.finish(deadline=seconds), seconds, row)
            self.ground.finish(row, -1)
            return lease
        finally:
            self._leave()

    def _leave(self) -> None:
        for row in (*self.rows, *self.ended):
            row.lease.abandon()
        for ticket in self.tickets:
            self.ground.over(ticket)

    async def ask(
        self,
        what: str,
        make: Callable[[], Awaitable[T]],
        seconds: float,
        row: Row | None = None,
        *,
        cuts: bool = True,
    ) -> T:
        """See `Client.ask`."""
        return await self.client.ask(what, make, seconds, row, cuts=cuts and self.cuts)

    async def call(
        self,
        row: Row,
        what: str,
        make: Callable[[], Awaitable[T]],
        seconds: float,
        *,
        cuts: bool = True,
    ) -> T | None:
        """Await a call that changes a lease.

        Returns:
            None if it did not happen: it was cancelled, too late or refused.

        Raises:
            LeaseEnded: the call has ended the lease, since its answer was lost.
        """
        tokens, table = row.lease.num_tokens, row.lease.block_table
        try:
            return await self.ask(what, make, seconds, row, cuts=cuts)
        except (Cut, DeadlineExceeded):
            row.cut = True
            await self._commit(row, 0)
        except (NoRoom, DeviceError, TokensCommitted, NotReady):  # tokens that a fork shares stay
            if row.lease.block_table != table:
                self.fail(f"a refused {what} changed the blocks of a lease")
        if row.lease.num_tokens != tokens:
            self.fail(f"a {what} that did not happen changed a lease")
        return None

    async def _commit(self, row: Row, computed: int) -> None:
        lease = row.lease
        row.solid = await self.ask(
            "commit", lambda: lease.commit(computed, deadline=2.0), 2.0, row, cuts=False
        )

    async def _admit(self) -> None:
        """Admit a drawn prompt, and compute what is not cached of it."""
        rng, ground, size = self.rng, self.ground, self.size
        prompt, seconds = self.client.prompt(), rng.choice(ground.deadlines)
        options = {
            "hints": self.client.hints(),
            "wait_for_evictions": rng.random() < 0.9,
            # with leases of its own it would wait for itself
            "wait_for_room": not self.rows and rng.random() < ground.mix.waits,
            "chunk_tokens": rng.choice((None, None, None, 1, size, 2 * size + 1)),
        }
        by = asyncio.get_running_loop().time() + seconds
        try:
            row = await self._acquire(prompt, seconds, options)
        except KVActorsError:
            self._again(prompt)
            raise
        if rng.random() < ground.mix.forgotten:
            self.seen["lease granted to forgotten"] += 1
            self.rows.remove(row)
            return
        if row.lease.pending and rng.random() < 0.05:
            self.seen["lease loading to ended"] += 1
            self.drop(row)
            return
        try:
            if row.lease.pending and rng.random() < 0.4:
                await self._layers(row, by)
            await self._ready(row, max(0.0, by - asyncio.get_running_loop().time()))
            await self.compute(row)
        except BaseException:
            self.drop(row)
            raise

    async def _acquire(self, prompt: Prompt, seconds: float, options: dict[str, Any]) -> Row:
        ground, client, cache = self.ground, self.client, self.cache
        ticket = ground.asked()
        self.tickets.append(ticket)
        ground.requests += 1
        buffer = buffer_of(self.rng, prompt.tokens)

        async def acquire() -> Row:
            call = cache.acquire(
                f"{client.name}.{ground.requests}",
                buffer,
                extra_keys=prompt.media,
                deadline=seconds,
                **prompt.scope,
                **options,
            )
            lease = await (spoiled(call, buffer) if self.rng.random() < 0.2 else call)
            row = Row(lease, prompt, ticket)
            self.rows.append(row)
            ground.granted(row)
            return row

        blocks, most = -(-len(prompt.tokens) // self.size), cache.config.device.num_blocks
        least = min(most, *(one.num_blocks for one in cache.config.cache.groups), most)
        try:
            return await self.ask("acquire", acquire, seconds)
        except NoRoom as error:  # `ProgressWatch` compares refusals with the pins
            if blocks <= least if isinstance(error, NeverFits) else blocks > most:
                self.fail(f"acquire of {blocks} blocks ended with {error!r}")
            self.seen["groups without room"] += bool(getattr(error, "__notes__", ()))
            raise

    async def _layers(self, row: Row, by: float) -> None:
        lease, loop = row.lease, asyncio.get_running_loop()
        for layer in range(self.cache.config.layout.num_layers):
            rest = max(0.0, by - loop.time()) + LATE_LOAD_S
            tokens = await self.ask(
                "wait_layer",
                lambda: lease.wait_layer(layer, deadline=8.0),  # noqa: B023
                rest,
                row,
            )
            names = self.ground.names(row, row.content)[: tokens // self.size]
            self.seen["lease layer checked"] += bool(names)
            if lease.pending and await self.ground.differing_layer(row, layer, names):
                await self.ground.wrong(row, f"layer {layer} was said to be there")

    async def _ready(self, row: Row, rest: float) -> None:
        """Wait for the loads, and compare the cached blocks."""
        lease, rest = row.lease, rest + LATE_LOAD_S
        try:
            await self.ask("wait_ready", lambda: lease.wait_ready(deadline=8.0), rest, row)
        except Cut:
            row.cut = True
            await self.ask(
                "wait_ready", lambda: lease.wait_ready(deadline=8.0), rest, row, cuts=False
            )
        row.solid = lease.cached_tokens // self.size
        row.computed = row.solid * self.size
        for tier, blocks in lease.hits._asdict().items():
            self.seen[f"hits {tier}"] += blocks
        if row.solid > len(row.tokens) // self.size:
            self.fail(f"{row.solid} blocks cached of {len(row.tokens) // self.size}")
        self.check_table(row)
        await self.check(row, "hit", hits=True)

    async def _end(self, row: Row) -> None:
        rng, lease, kind = self.rng, row.lease, draw(self.rng, ENDS)
        self.rows.remove(row)
        self.ended.append(row)
        await self.check(row, "held to the end")
        self.seen[f"lease ready to {kind}"] += 1
        if kind == "finish":
            hints, epoch = self.client.hints(), self.ground.pins.begin()
            computed = rng.choice((None, row.computed))
            await self.ask(
                kind, lambda: lease.finish(computed, hints=hints, deadline=3.0), 3.0, row
            )
            self.ground.finish(row, epoch)
            if rng.random() < 0.1:
                with suppress(LeaseEnded):
                    await lease.finish()
                    self.fail("finish of a finished lease was accepted")
        elif kind == "preempt":
            computed = rng.choice((0, row.computed))
            await self.ask(kind, lambda: lease.preempt(computed, deadline=3.0), 3.0, row)
        elif kind == "leave":
            async with lease:
                pass
        elif kind == "fail":
            with suppress(EngineFailed):
                async with lease:
                    raise EngineFailed
        if kind == "preempt" or rng.random() < 0.2:
            self._again(row.prompt._replace(tokens=list(row.tokens), media=row.content[1]))

    def _again(self, prompt: Prompt) -> None:
        self.client.left.append(prompt)
        del self.client.left[:-8]

    def drop(self, row: Row) -> None:
        """Abandon a request."""
        row.lease.abandon()
        if row in self.rows:
            self.rows.remove(row)
        self.ended.append(row)

    # -- blocks

    async def write(self, row: Row, content: Content, start: int, stop: int) -> None:
        """Compute full blocks of a content."""
        await self.ground.own(self.client, row)
        if start < stop:
            await self.ground.write(row, start, self.ground.names(row, content)[start:stop])

    async def compute(self, row: Row) -> None:
        """Compute the blocks that are not committed, the last one that is not full as well, and
        compare all. A state goes on from the last computed token, and each pass is committed: what
        it reads is compared before."""
        lease, covered = row.lease, row.lease.covered_tokens
        if not self.has_states:
            row.computed, row.tail = row.solid * self.size, b""
        while (at := row.computed) < covered:
            stop = covered
            if self.has_states:
                await self.check(row, "read by a pass")
                stop = self.rng.choice((covered, covered, self.rng.randint(at + 1, covered)))
            end = row.computed = lease.pass_end(at, stop)
            row.tail = b""
            await self.write(row, row.content, at // self.size, end // self.size)
            if end % self.size:
                tail = self.rng.randbytes(self.ground.name_bytes)
                await self.ground.write(row, end // self.size, [tail])
                row.tail = tail
            if self.has_states:
                await self._commit(row, end)
        await self.check(row, "computed")

    async def check(self, row: Row, what: str, *, hits: bool = False) -> None:
        """Every computed block of a request holds its bytes."""
        await self.ground.own(self.client, row)
        names = [*self.ground.names(row, row.content)[: row.computed // self.size]]
        if row.tail:
            names.append(row.tail)
            self.seen["tails verified"] += 1
        wrong = await self.ground.differing(row, 0, names, hits=hits) if names else ()
        if wrong:
            await self.ground.wrong(row, f"{what}: {len(wrong)} of {len(names)} blocks")

    def check_table(self, row: Row) -> None:
        """A lease has its tokens, and a block for each of those that it covers."""
        lease, table = row.lease, row.lease.block_table
        if lease.num_tokens != len(row.tokens):
            self.fail(f"{lease.num_tokens} tokens of a lease, {len(row.tokens)} given")
        if len(table) * self.size < lease.covered_tokens:
            self.fail(f"{len(table)} blocks for {lease.covered_tokens} tokens")
        if len(set(table)) < len(table):
            self.fail("a block stands twice in a table")

    # -- operations

    async def _operate(self) -> None:
        """A drawn operation. A request whose lease has ended leaves the batch."""
        mix, rng = self.ground.mix, self.rng
        kind = draw(rng, OPERATIONS | {"fork": FORK * mix.forks, "hostile": HOSTILE * mix.hostile})
        row = rng.choice(self.rows)
        work: dict[str, Callable[[Row], Awaitable[object]]] = {
            "step": self._step,
            "extend": self._extend,
            "speculate": self._speculate,
            "next_chunk": self._next_chunk,
            "reserve": self._reserve,
            "commit": self._commit_some,
            "pass": self._pass,
            "look": self._look,
            "think": self._think,
            "fork": self._fork,
            "hostile": self._hostile,
        }
        try:
            await work[kind](row)
        except KVActorsError:
            if row in self.rows:
                self.drop(row)
            if kind in ("step", "pass"):
                raise
        if 1 < len(self.rows) < 5 or rng.random() < 0.1:
            for other in tuple(self.rows):
                await self.check(other, f"beside {kind}")

    async def _think(self, _: Row) -> None:
        await asyncio.sleep(self.rng.choice(self.ground.moments))

    async def _commit_some(self, row: Row) -> None:
        rng, lease = self.rng, row.lease
        computed = row.computed if rng.random() < 0.7 else rng.randint(0, row.computed)
        for _ in range(rng.choice((1, 1, 2))):  # a retried call
            blocks = await self.call(
                row, "commit", lambda: lease.commit(computed, deadline=2.0), 2.0
            )
            row.solid = row.solid if blocks is None else blocks

    async def _extend(self, row: Row) -> None:
        """Some more tokens."""
        rng, lease, seconds = self.rng, row.lease, self.rng.choice(self.ground.deadlines)
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 2 * self.size))]
        media: tuple[Media, ...] = ((len(tokens) - 1, 1, "still"),) if rng.random() < 0.2 else ()
        buffer, spoils = buffer_of(rng, tokens), rng.random() < 0.3
        covered = lease.covered_tokens == lease.num_tokens

        def extend() -> Awaitable[tuple[int, ...]]:
            call = lease.extend(buffer, extra_keys=media, deadline=seconds)
            return spoiled(call, buffer) if spoils else call

        # a cancellation before the buffer changes would lose the answer of a call that happened
        added = await self.call(row, "extend", extend, seconds, cuts=not spoils)
        if added is None:  # the engine samples again: a carried out call would be found later
            self._again(row.prompt._replace(tokens=row.tokens + tokens, media=row.content[1]))
            return
        row.content = extended(row.content, (tokens, media))
        self.check_table(row)
        if covered and lease.block_table[len(lease.block_table) - len(added) :] != added:
            self.fail("extend returned other blocks than it appended")
        await self.compute(row)
        if rng.random() < 0.7:
            await self._commit_some(row)

    async def _next_chunk(self, row: Row) -> None:
        """The blocks of the next chunk of a prompt."""
        rng, lease, seconds = self.rng, row.lease, self.rng.choice(self.ground.deadlines)
        before = lease.covered_tokens
        if before == lease.num_tokens:
            return
        count = rng.randint(1, lease.num_tokens - before)
        taken = await self.call(
            row, "next_chunk", lambda: lease.next_chunk(count, deadline=seconds), seconds
        )
        if taken is not None:
            self.seen["next chunk"] += 1
            if lease.covered_tokens < min(lease.num_tokens, before + count):
                self.fail("a chunk is not covered")
            await self.compute(row)

    async def _reserve(self, row: Row) -> bool:
        """Blocks for later tokens. They also cover tokens of a chunked prompt."""
        rng, lease, seconds = self.rng, row.lease, self.rng.choice(self.ground.deadlines)
        most = min(3, turn_blocks_of(self.size)) * self.size
        count, covered = rng.randint(0, most), lease.covered_tokens
        taken = await self.call(
            row, "reserve", lambda: lease.reserve(count, deadline=seconds), seconds
        )
        if lease.covered_tokens > covered:
            await self.compute(row)
        return taken is not None

    async def _speculate(self, row: Row) -> None:
        """Drafts in reserved blocks, of which some are rejected, and tokens in their place."""
        rng, lease = self.rng, row.lease
        if lease.covered_tokens < lease.num_tokens:
            await self._next_chunk(row)
            return
        before = lease.num_tokens
        if not await self._reserve(row):
            return
        await self._extend(row)
        least = max(1, row.solid * self.size)
        kept = rng.randint(least if rng.random() < 0.2 else max(least, before), lease.num_tokens)
        if any(offset < kept < offset + length for offset, length, _ in row.content[1]):
            kept = lease.num_tokens  # an item is kept whole
        if self.has_states:
            kept = max(kept, row.computed)  # a state cannot go back
        cut = await self.call(row, "truncate", lambda: lease.truncate(kept, deadline=2.0), 2.0)
        if cut is None:
            return
        row.content = truncated(row.content, kept)
        if kept < row.computed:
            row.computed, row.tail = kept, b""
        if len(lease.block_table) != -(-kept // self.size):
            self.fail(f"{len(lease.block_table)} blocks for {kept} tokens")
        if row.solid:
            try:
                await lease.truncate(row.solid * self.size - 1, deadline=2.0)
                self.fail(f"tokens of {row.solid} committed blocks were dropped")
            except (TokensCommitted, ValueError):  # ValueError: within an item of media
                self.seen["outcome truncate TokensCommitted"] += 1
        await self.compute(row)

    async def _fork(self, row: Row) -> None:
        """Branches with the full blocks of their parent and a copy of its last one. They go on as
        other requests of the batch do."""
        rng, lease = self.rng, row.lease
        count, room = rng.choice((1, 1, 2, 4)), rng.random() < self.ground.mix.waits
        seconds = 0.05 if room else rng.choice(self.ground.deadlines)
        if len(self.rows) + count > SIZES[-1]:
            return

        async def fork() -> list[Row]:
            made = await lease.fork_many(count, wait_for_room=room, deadline=seconds)
            branches = [row.branch(one) for one in made]
            self.rows += branches  # in this step: the caller may be cancelled
            return branches

        branches = await self.call(row, "fork", fork, seconds) or []
        full = len(row.tokens) // self.size
        for one in branches:
            self.seen["forked"] += 1
            self.seen["forks of a fork"] += one.depth > 1
            mine, others = one.lease.block_table, lease.block_table
            if mine[:full] != others[:full]:
                self.fail("a fork has other full blocks than its parent")
            if len(mine) > full and len(others) > full and mine[full] == others[full]:
                self.fail("a fork has the last block of its parent")
            self.check_table(one)
            await self.check(one, "forked")

    async def _look(self, row: Row) -> None:
        """Look a prompt up: nothing changes by it, and what it finds is in bounds."""
        cache, prefix, before = self.cache, self.cache.system.index_actor, self.cache.free_blocks()
        tree = prefix.index.tree.statistics()
        hits = cache.lookup(row.tokens, extra_keys=row.content[1], **row.prompt.scope)
        if cache.free_blocks() != before or prefix.index.tree.statistics() != tree:
            self.fail("a look-up changed the index")
        full = len(row.tokens) // self.size
        if not (hits.total <= full and 0 <= hits.new_blocks <= full + 1 - hits.device):
            self.fail(f"a look-up found {hits} of {full} blocks")
        if before.free + before.evictable > before.total or min(before) < 0:
            self.fail(f"free blocks do not add up: {before}")
        self.seen["looked up with hits"] += hits.total > 0

    async def _hostile(self, row: Row) -> None:
        name = self.rng.choice([*REFUSED])
        try:
            await REFUSED[name](self.cache, row.lease)
        except (TypeError, ValueError):
            self.seen["hostile"] += 1
        except LeaseEnded:
            raise
        except KVActorsError as error:
            if not (self.ground.closing or self.ground.faulty):
                self.fail(f"{name} raised {error!r}")
        else:
            self.fail(f"{name} was accepted")

    async def _pass(self, _: Row) -> None:
        """A pass of the device. Some of its requests end before it is over."""
        rng, loop = self.rng, asyncio.get_running_loop()
        rows = rng.sample(self.rows, rng.randint(1, len(self.rows)))
        event: asyncio.Future[None] = loop.create_future()
        over = self.cache.record_pass([row.lease for row in rows], event=event)
        writing = loop.create_task(self._write_pass(rows, event))
        await asyncio.sleep(0)
        for row in rng.sample(rows, rng.choice((0, 0, 1, len(rows)))):
            self.seen["ended in a pass"] += 1
            self.drop(row)
        await over
        await writing

    async def _write_pass(self, rows: list[Row], event: asyncio.Future[None]) -> None:
        """The device writes the blocks of a pass, those of ended requests too."""
        await asyncio.sleep(self.rng.choice(self.ground.moments))
        try:
            for row in rows:
                full = row.computed // self.size
                await self.write(row, row.content, full if self.has_states else row.solid, full)
                if row.tail:
                    await self.ground.write(row, full, [row.tail])
        except KVActorsError as error:  # the index or a rank has failed
            self.seen[f"pass {type(error).__name__}"] += 1
        event.set_result(None)

    # -- a step

    async def _entry(self, row: Row, *, alone: bool) -> Entry:
        """Draw an entry. Some tokens are computed before the call: their blocks are there. Beside
        another call, which may come first, only what it leaves is committed."""
        rng, size, lease = self.rng, self.size, row.lease
        kind, known = draw(rng, ENTRIES), len(row.tokens)
        if not alone and rng.random() < 0.4:
            kind = "tokens"  # whose position the other call changes
        chunked = lease.covered_tokens < known
        if kind == "uncovered" and not (chunked and alone):
            kind = "token"
        count = {
            "token": 1,
            "tokens": rng.randint(1, 2 * size),
            "long": rng.choice((1, 1, 4)) * rng.randint(1, 4 * size),
        }.get(kind, 0)
        tokens = [rng.randrange(4) for _ in range(count)]
        computed = rng.choice((None, row.computed, row.computed, rng.randint(0, row.computed)))
        if kind == "uncovered":
            computed = rng.choice((known, rng.randint(lease.covered_tokens + 1, known)))
        elif self.has_states:
            pass  # a pass ends where the lease says, which has the tokens after the step
        elif count and alone and not chunked and known + count <= len(lease.block_table) * size:
            content = extended(row.content, (tokens, ()))
            row.tail = b""
            await self.write(row, content, known // size, (known + count) // size)
            computed = rng.choice((computed, known + count, known + count))
            self.seen["tokens computed before a step"] += 1
        buffer = rng.choice((list, np.array))(tokens) if count else rng.choice(((), []))
        return Entry(row, kind, (tokens, ()), buffer, computed)

    async def _step(self, _: Row) -> None:
        """One step, some calls beside it, and everything that must be so afterwards."""
        rng, rows = self.rng, self.rows
        picked = rng.sample(rows, rng.choice((len(rows), rng.randint(1, len(rows)))))
        if rng.random() < 0.05:
            await self._refused(rng.choice(picked))
        beside = draw(rng, BESIDE)
        when = rng.choice(WHEN)
        other = Beside(self, beside, rng.choice(picked), when) if beside != "nothing" else None
        entries = []
        for row in picked:
            alone = other is None or other.row is not row
            entries.append(await self._entry(row, alone=alone))
        for row in rng.sample(self.ended, min(len(self.ended), rng.choice((0, 0, 0, 1)))):
            tokens = [rng.randrange(4)]
            entry = Entry(row, "ended", (tokens, ()), list(tokens), None)
            entries.insert(rng.randrange(len(entries) + 1), entry)
        before = {id(row): len(row.lease.block_table) for row in picked}
        self._count(entries)
        if other is not None and when == "before":
            await other.begin()
        call = Call(self, entries, cut=rng.random() < 0.15)
        try:
            await call.run(other)
        finally:
            if other is not None:
                await other.end()
        await self._orphans()
        for number, entry in enumerate(entries):
            if entry.kind == "ended":
                call.judge_ended(number)
            else:
                beside_row = other if other is not None and other.row is entry.row else None
                await self._settle(call, number, beside_row, before[id(entry.row)])

    def _count(self, entries: list[Entry]) -> None:
        needed = 0
        for one in entries:
            self.seen[f"entry {one.kind}"] += 1
            tokens = len(one.row.tokens) + len(one.added[0])
            needed += max(0, -(-tokens // self.size) - len(one.row.lease.block_table))
        blocks = self.cache.free_blocks()
        self.seen["steps"] += 1
        self.seen["steps of 8 or more"] += len(entries) >= 8
        self.seen["steps that evict"] += blocks.free < needed <= blocks.available

    async def _refused(self, row: Row) -> None:
        """A step with a bad argument raises in its caller. Nothing changes."""
        rng, rows = self.rng, self.rows
        steps: list[Any] = [Step(one.lease, [1]) for one in rows if one is not row]
        bad = rng.choice(
            (Step(row.lease, *rng.choice(BAD)(row)), *([steps[0]] if steps else []), row.lease)
        )
        steps.insert(rng.randrange(len(steps) + 1), bad)
        try:
            await self.cache.step(steps)
        except (TypeError, ValueError):
            self.seen["steps refused"] += 1
        else:
            self.fail(f"a step with {bad!r} was accepted")
        for one in rows:
            if one.lease.num_tokens != len(one.tokens):
                self.fail("a refused step changed a lease")

    async def _orphans(self) -> None:
        """No task of the library is left when every call of `step` has ended."""
        await asyncio.sleep(0)
        if Call.open or self.ground.threaded:
            return
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if (
                code is not None
                and code.co_filename.endswith(LIBRARY)
                and (
                    code.co_name.startswith("_") > code.co_name.startswith("__")
                    or code.co_filename.endswith(LIBRARY[0])
                )
            ):
                self.fail(f"a step has left a task: {code.co_qualname}")

    async def _settle(self, call: Call, number: int, other: Beside | None, before: int) -> None:
        """The lease and the index agree on one of the contents that the calls can have led to."""
        entry = call.entries[number]
        row, lease = entry.row, entry.row.lease
        happened = call.judge(number, other)
        outcome = call.outcome(number)
        about = (
            f"entry {entry.kind} {outcome and type(outcome.error).__name__}, event {call.kind} "
            f"{type(call.error).__name__}, beside it {other and other.kind}"
        )
        row.cut |= call.may_end(number) or (other is not None and other.ends)
        try:
            await self._commit(row, 0)  # answered after the calls before
        except KVActorsError:
            self.drop(row)
            return
        contents = [row.content]
        changes = [lambda one: extended(one, entry.added)] if happened else []
        if other is not None and other.happened:
            changes.append(other.change)
        if changes:
            contents = [changes[0](row.content)]
        if len(changes) == 2:
            contents = [changes[1](changes[0](row.content)), changes[0](changes[1](row.content))]
        names = [named(lease, one) for one in contents]
        found = content_of(lease._path)
        if found not in names:
            differ = [
                field
                for field, one, other_one in zip(found._fields, found, names[0], strict=True)
                if one != other_one
            ]
            self.fail(f"a lease has other {differ} than the calls gave it: {about}")
            self.drop(row)
            return
        row.content = contents[names.index(found)]
        for what in self._differences(row):
            self.fail(f"{what}: {about}")
        if happened and other is None:
            self._judge_outcome(outcome, entry, before)
        self.check_table(row)
        if lease.num_tokens == len(row.tokens):
            await self.compute(row)
        else:
            self.drop(row)

    def _judge_outcome(self, outcome: Any, entry: Entry, before: int) -> None:
        """The blocks and the count of a step that happened alone."""
        row, size = entry.row, self.size
        table: Sequence[int] = row.lease.block_table
        needed = max(0, -(-len(row.tokens) // size) - before) if entry.added[0] else 0
        if len(outcome.blocks) != needed or table[before:] != outcome.blocks:
            self.fail(f"{entry.kind}: {len(outcome.blocks)} blocks for a step that needs {needed}")
        most = max(row.computed, entry.computed or 0) // size
        if outcome.committed_blocks > max(most, row.solid):
            self.fail(f"{entry.kind}: {outcome.committed_blocks} blocks committed of {most}")

    def _differences(self, row: Row) -> list[str]:
        """Facts that a lease and the index disagree on."""
        lease, found = row.lease, []
        state = self.cache.system.index_actor.leases.get(lease._handle.id)
        if state is None:
            return ["the index has no such lease"]
        if lease.num_tokens != state.path.num_tokens:
            found.append(
                f"{lease.num_tokens} tokens of a lease, the index has {state.path.num_tokens}"
            )
        if lease.block_table != tuple(state.path.blocks()):
            found.append("a lease has other blocks than the index has for it")
        if lease._handle.changing or lease._handle.committing:
            found.append(f"a lease without a call is busy with {lease._handle.changing!r}")
        return found
