"""The reference serving engine: acquire, wait for loads, compute, commit, extend, end.

Its model writes a pattern derived from each block hash, so every block that comes back can be
verified byte for byte. Scenarios, replays and the tests that put a cache under load use it. They
differ in its parameters: where blocks are computed, which blocks are verified, and what wrong bytes
and errors lead to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any, NamedTuple, Self, TypeAlias

import anyio

from kvactors.cache import KVCache
from kvactors.errors import DeadlineExceeded, KVActorsError, NeverFits, NoRoom
from kvactors.lease import Lease
from kvactors.scenario.report import Progress, Totals
from kvactors.types import HASH_BYTES, Tokens

IDLE = 300.0
"""Seconds within which a cache must be idle between turns. Only a hang takes as long."""

RETRY = 0.005
"""Seconds until a request that found too few free blocks tries again."""

Observe: TypeAlias = Callable[[KVCache], AbstractAsyncContextManager[Any]]
"""Entered with the open cache of a run, and left before it closes."""


class Model:
    """Computes blocks on a device that can `fill` and `check`. names: 32 bytes for the contents of
    each block."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def on(self, device: Any) -> Self:
        """The same model on another device."""
        made = copy(self)
        made._device = device
        return made

    async def run(self, call: Callable[[], Any]) -> Any:
        return call()

    async def fill(self, blocks: Sequence[int], names: bytes) -> None:
        await self.run(lambda: self._device.fill(blocks, names))

    async def check(self, blocks: Sequence[int], names: bytes) -> Sequence[int]:
        """Indices of the blocks that do not hold those contents."""
        bad: Sequence[int] = await self.run(lambda: self._device.check(blocks, names))
        return bad


class GroupModel(NamedTuple):
    """The model's layers of one group. window: tokens. 0: the layers keep a state."""

    model: Model
    window: int


class ScenarioRequest:
    """A lease, and the contents that its blocks must have.

    Attributes:
        computed: number of leading tokens that were computed, or whose loads have landed.
    """

    def __init__(
        self, lease: Lease, block_size: int, model: Model, groups: Sequence[GroupModel] = ()
    ) -> None:
        self.lease = lease
        self.computed = 0
        self._block_size = block_size
        self._model, self._groups = model, groups

    @property
    def known(self) -> int:
        """Leading blocks with contents."""
        return self.computed // self._block_size

    @property
    def full(self) -> int:
        return self.lease.num_tokens // self._block_size

    def landed(self) -> None:
        """The loads have landed: the cached blocks hold the contents of their hashes."""
        self.computed = self.lease.cached_tokens

    async def compute(self, stop: int | None = None) -> None:
        """Compute the tokens before `stop`, None for all, in passes that end where a group of
        layers wants a snapshot. All passes but the last are committed."""
        stop = self.lease.num_tokens if stop is None else stop
        while self.computed < stop:
            end = self.lease.pass_end(self.computed, stop)
            await self._run_pass(self.computed, end)
            self.computed = end
            if end < stop:
                await self.lease.commit(end)

    async def _run_pass(self, start: int, stop: int) -> None:
        first, last = start // self._block_size, stop // self._block_size
        names = self.lease.hashes(first, last)
        main, *tables = self.lease.block_tables
        if names:
            await self._model.fill(main[first:last], names)
        for group, table in zip(self._groups, tables, strict=True):
            if not group.window:
                # the state after a part of a block has other contents than any snapshot
                whole = stop % self._block_size == 0
                name = names[-HASH_BYTES:] if whole else bytes(HASH_BYTES)
                await group.model.fill([table[(stop - 1) // self._block_size]], name)
            elif names:
                await group.model.fill(table[first:last], names)

    async def verify(self, start: int = 0, stop: int | None = None) -> Sequence[int]:
        """Compare known blocks with their contents. Returns the positions of the wrong ones."""
        stop = self.known if stop is None else stop
        blocks, names = self.lease.block_table[start:stop], self.lease.hashes(start, stop)
        return [start + index for index in await self._model.check(blocks, names)]

    async def verify_groups(self) -> tuple[int, Sequence[int]]:
        """Compare the blocks that the next pass reads in the groups of layers with their contents.
        Returns the number of blocks, and the positions of the wrong ones."""
        checked, wrong, stop = 0, list[int](), self.known
        for group, table in zip(self._groups, self.lease.block_tables[1:], strict=True):
            start = max(0, self.computed - group.window + 1) // self._block_size
            if not group.window:
                start = stop if self.computed % self._block_size else max(0, stop - 1)
            if start < stop:
                names = self.lease.hashes(start, stop)
                bad = await group.model.check(table[start:stop], names)
                wrong += [start + index for index in bad]
                checked += stop - start
        return checked, wrong


OnWrong = Callable[[ScenarioRequest, Sequence[int], str], Awaitable[None]]
"""Called with a request, the positions of its wrong blocks, and when they were found."""


class Engine:
    """Serves requests on a cache and keeps the totals.

    Args:
        model: where blocks are computed. None: on the cache's own device, in this process.
        thorough: verify every cached block, and at the end of a request all of its blocks. If not
            set, the blocks loaded from a lower tier.
        on_wrong: called in addition to counting wrong blocks.
    """

    RETRIED: tuple[type[KVActorsError], ...] = (NoRoom,)

    def __init__(
        self,
        cache: KVCache,
        totals: Totals,
        model: Model | None = None,
        *,
        thorough: bool = False,
        on_wrong: OnWrong | None = None,
    ) -> None:
        self.cache = cache
        self.totals = totals
        self.model = Model(cache.device) if model is None else model
        self._thorough = thorough
        self._on_wrong = on_wrong

    def request(self, lease: Lease) -> ScenarioRequest:
        groups = [
            GroupModel(self.model.on(cache.device), config.window)
            for config, cache in zip(
                self.cache.config.cache.groups, self.cache.groups.values(), strict=True
            )
        ]
        return ScenarioRequest(lease, self.cache.block_size, self.model, groups)

    async def begin(self, request: ScenarioRequest, *, resumed: bool = False) -> None:
        """Wait for the loads, count the hits, verify the blocks. A resumed request is not counted
        again."""
        lease, totals = request.lease, self.totals
        await lease.wait_ready()
        request.landed()
        hits = lease.hits
        if not resumed:
            totals.count_request(lease.num_tokens // self.cache.block_size, hits)
        if lease.cached_tokens > lease.num_tokens:
            totals.complain("cached_tokens exceeds the tokens of the request")
        if self._thorough:
            await self.verify(request, 0, request.known, "served")
        else:
            await self.verify(request, hits.device, sum(hits), "served")
        await self.verify_groups(request, "served")

    async def compute(self, request: ScenarioRequest) -> None:
        await request.compute()
        await request.lease.commit(request.lease.num_tokens)

    async def verify(self, request: ScenarioRequest, start: int, stop: int, when: str) -> None:
        if start >= stop:
            return
        await self._count(request, stop - start, await request.verify(start, stop), when)

    async def verify_groups(self, request: ScenarioRequest, when: str) -> None:
        await self._count(request, *await request.verify_groups(), when)

    async def _count(
        self, request: ScenarioRequest, checked: int, wrong: Sequence[int], when: str
    ) -> None:
        self.totals.verified_blocks += checked
        if wrong and self._on_wrong is not None:
            await self._on_wrong(request, wrong, when)
        self.totals.corrupt_blocks_served += len(wrong)

    async def serve(
        self,
        name: str,
        tokens: Tokens,
        output: Tokens = (),
        *,
        think: float = 0.0,
        output_tokens: int | None = None,
        **options: Any,
    ) -> Lease:
        """Serve one request from acquire to its end. Raises NoRoom: the cache has no free blocks
        for the request."""
        async with await self.cache.acquire(name, tokens, **options) as lease:
            request = self.request(lease)
            await self.begin(request)
            cached = request.known
            await self.compute(request)
            if think:
                await anyio.sleep(think)
            if len(output):
                await lease.extend(output)
                await self.compute(request)
            if self._thorough:
                await self.verify(request, cached, request.full, "held")
                await self.verify_groups(request, "held")
            await lease.finish(output_tokens=output_tokens)
        self.totals.finished += 1
        return lease

    async def serve_patiently(
        self, name: str, tokens: Tokens, output: Tokens = (), **options: Any
    ) -> Lease | None:
        """Serve one request, and try again while too few blocks are free. One that the device could
        never hold is rejected. An error goes into the totals. options: of `serve`."""
        totals, cache = self.totals, self.cache
        if len(tokens) + len(output) > cache.device.num_blocks * cache.block_size:
            totals.rejected += 1
            return None
        while True:
            try:
                return await self.serve(name, tokens, output, **options)
            except NeverFits:  # a group of layers is too small
                totals.rejected += 1
                return None
            except self.RETRIED:
                totals.no_room += 1
                await anyio.sleep(RETRY)
            except KVActorsError as error:
                self.failed(name, error)
                return None

    async def settle(self, sinks: Collection[str] | None = None) -> None:
        """Wait until nothing is in flight and every sink (of those named) has its deliveries."""
        try:
            await self.cache.wait_flushed(sinks=sinks)
        except DeadlineExceeded as error:
            self.totals.complain(f"at the end: {error}")

    async def idle(self) -> None:
        """Wait until the cache has nothing left to do, however slow the disk is. More than IDLE
        seconds are an error in the totals."""
        try:
            await self.cache.wait_idle(IDLE)
        except DeadlineExceeded as error:
            self.totals.complain(f"between turns: {error}")

    def failed(self, name: str, error: KVActorsError) -> None:
        self.totals.complain(f"request {name}: {type(error).__name__}: {error}")


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside a block of code. They are cancelled at its end."""
    tasks = [asyncio.get_running_loop().create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def reporting(totals: Totals, progress: Progress) -> AsyncIterator[None]:
    """Report progress a few times a second during a block of code, and at its end."""

    async def report() -> None:
        while True:
            progress(totals)
            await anyio.sleep(0.1)

    async with beside(report()):
        yield
    progress(totals)
