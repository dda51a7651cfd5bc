"""Clients of a cache of several groups of layers make every call at once, and give up at any await:
each pass reads what it needs, and a lease has blocks in every group or in none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from kvactors import Step
from kvactors.errors import KVActorsError, LeaseBusy, LeaseEnded, NoRoom
from kvactors.testing.loop import SimLoop, simulate
from tests.load.calls import Cut, cut_soon
from tests.support.cache import BLOCK
from tests.support.layers import Model, opened, state, window

SCOPES: tuple[dict[str, str], ...] = ({}, {}, {"salt": "a"}, {"salt": "b"}, {"lora": "x"})

GROUPS: dict[str, list[Any]] = {
    "window": [window(30)],
    "state": [state(16)],
    "window and state": [window(30), state(16)],
    "host tier": [state(8, slots=4), window(16, slots=8)],
    "two windows and a state": [
        window(40, tokens=3),
        {**window(30, tokens=20), "name": "wide"},
        state(20, every=0),
    ],
    "state of every block": [state(20, every=1)],
    "window longer than any prompt": [window(30, tokens=100)],
}

Call = Callable[[], Coroutine[Any, Any, Any]]


def lives(lease: Any) -> bool:
    """Whether a lease has blocks in every group for the same tokens. Otherwise it has ended in all
    of them."""
    leases = [lease, *(part.lease for part in lease._parts)]
    assert len({one._handle.ended for one in leases}) == 1
    if lease._handle.ended:
        return False
    for one in leases:
        known = one._handle.context.system.index_actor.leases.get(one._handle.id)
        if known is None:  # its index has failed since
            return False
        assert known.path.num_tokens == one.num_tokens
        assert list(known.path.table()) == list(one._table)
    covered = len(lease._table)
    for part in lease._parts:
        complete = sum(block < min(lease._path.num_full_blocks, covered) for block in part.blocks)
        assert part.lease.num_tokens >= complete * part.group.words
        assert len(part.blocks) == len(part.lease._table)
        assert max(part.blocks, default=part.floor - 1) >= covered - 1
    return True


class Client:
    """Requests one after another. cuts: share of the calls that are cancelled."""

    def __init__(self, model: Model, name: str, seen: Counter[str], cuts: float) -> None:
        self.model, self.cache, self.name = model, model.cache, name
        self.seen, self.cuts = seen, cuts
        self.rng = random.Random(name)
        self.drafts = all(group.kind == "window" for group in model.groups)

    async def run(self, requests: int, prompts: list[list[int]]) -> None:
        for number in range(requests):
            tokens = list(self.rng.choice(prompts))
            try:
                await self.request(f"{self.name}.{number}", tokens)
            except (Cut, KVActorsError) as error:
                self.seen[f"request {type(error).__name__}"] += 1
            if len(tokens) < 70 and self.rng.random() < 0.3:
                prompts[self.rng.randrange(len(prompts))] = tokens

    async def call(self, make: Call, lease: Any = None) -> Any:
        """Make a call, which may be cancelled: it did not happen, or the lease has ended."""
        cut = self.rng.random() < self.cuts
        try:
            return await (cut_soon(self.rng, make) if cut else make())
        except Cut:
            self.seen["cut"] += 1
            raise
        finally:
            if lease is not None:
                lives(lease)

    async def again(self, make: Call, lease: Any) -> Any:
        """Make a call that changes nothing if it is refused, until it succeeds."""
        for _ in range(3):
            try:
                return await self.call(make, lease)
            except (NoRoom, Cut):
                lease._handle.check_ended()
                await asyncio.sleep(self.rng.choice((0, 0.001)))
        return await self.call(make, lease)

    async def request(self, name: str, tokens: list[int]) -> None:
        rng = self.rng
        options = {
            "chunk_tokens": rng.choice((None, None, BLOCK, 7)),
            "wait_for_room": rng.random() < 0.7,
            "deadline": rng.choice((0.003, 0.05, 5.0, 5.0)),
            **rng.choice(SCOPES),
        }
        lease = await self.call(partial(self.cache.acquire, name, list(tokens), **options))
        leases = [(lease, tokens)]
        try:
            await self.prefill(lease, tokens, options["chunk_tokens"] or 1 << 20)
            for _ in range(rng.randrange(4)):
                await self.act(lease, tokens, leases)
            for one, said in leases:
                await self.end(one, said)
        finally:
            for one, _ in leases:
                if rng.random() < 0.8:  # the others are forgotten
                    one.abandon()
                    lives(one)

    async def prefill(self, lease: Any, tokens: list[int], size: int) -> None:
        await self.call(lease.wait_ready, lease)
        at = lease.cached_tokens
        self.seen["hits"] += at > 0
        while at < len(tokens):
            while lease.covered_tokens <= at:
                await self.again(partial(lease.next_chunk, size), lease)
            end = lease.pass_end(at, min(at + size, len(tokens), lease.covered_tokens))
            await self.compute(lease, tokens, at, end)
            at = end

    async def compute(self, lease: Any, tokens: list[int], start: int, stop: int) -> None:
        """A pass, which may take a while, and its commit."""
        over = asyncio.get_running_loop().create_future()
        slow = self.rng.random() < 0.2 and lives(lease)
        done = self.cache.record_pass([lease], event=over) if slow else None
        try:
            if slow:
                await asyncio.sleep(self.rng.choice((0, 0.001)))
            if not lives(lease):
                raise LeaseEnded("others may have its blocks")
            self.model.compute(lease, tokens, start, stop)
        finally:
            over.set_result(None)
        if done is not None:
            await done
        await self.call(partial(lease.commit, stop), lease)

    async def act(self, lease: Any, tokens: list[int], leases: list[Any]) -> None:
        rng = self.rng
        what = rng.choice(("decode", "decode", "draft", "reserve", "fork", "step", "at once"))
        if what == "decode":
            for token in self.draw(6):
                await self.again(partial(lease.extend, [token]), lease)
                tokens.append(token)
                await self.compute(lease, tokens, len(tokens) - 1, len(tokens))
        elif what == "draft" and self.drafts:
            await self.again(partial(lease.extend, self.draw(2 * BLOCK)), lease)
            await self.again(partial(lease.truncate, len(tokens)), lease)
        elif what == "reserve":
            await self.again(partial(lease.reserve, rng.randrange(12)), lease)
            if rng.random() < 0.5:
                await self.again(partial(lease.truncate, len(tokens)), lease)
        elif what == "fork" and len(leases) < 3:
            room = rng.random() < 0.3
            fork = partial(lease.fork_many, 2, wait_for_room=room, deadline=0.1)
            leases += [(one, list(tokens)) for one in await self.again(fork, lease)]
        elif what == "step":
            for _ in range(rng.randrange(1, 6)):
                await self.step([one for one in leases if lives(one[0])])
        elif what == "at once":
            await self.at_once(lease, tokens)

    def draw(self, most: int) -> list[int]:
        return [self.rng.randrange(9) for _ in range(self.rng.randrange(most))]

    async def step(self, rows: list[tuple[Any, list[int]]]) -> None:
        """A decode step, whose tokens are then computed."""
        token, outcomes = self.rng.randrange(9), []
        steps = [Step(lease, [token], len(said)) for lease, said in rows]
        with contextlib.suppress(Cut):
            outcomes = await self.call(partial(self.cache.step, steps, deadline=1.0))
        for row, (lease, said) in enumerate(rows):
            happened = bool(outcomes) and outcomes[row].error is None
            if lives(lease):
                assert lease.num_tokens == len(said) + happened
            else:
                assert not happened
            if happened:
                said.append(token)
                await self.compute(lease, said, len(said) - 1, len(said))

    async def at_once(self, lease: Any, tokens: list[int]) -> None:
        """A commit and two extends of a lease at once."""
        token, before = self.rng.randrange(9), len(tokens)
        results = await asyncio.gather(
            self.call(partial(lease.commit, before)),
            self.call(partial(lease.extend, [token])),
            self.call(partial(lease.extend, [token])),
            return_exceptions=True,
        )
        for error in results:
            if not isinstance(error, int | tuple | Cut | LeaseBusy | LeaseEnded | NoRoom):
                raise error
        if lives(lease):
            tokens += [token] * (lease.num_tokens - before)
            for at in range(before, len(tokens)):
                await self.compute(lease, tokens, at, at + 1)

    async def end(self, lease: Any, tokens: list[int]) -> None:
        what = self.rng.choice((lease.finish, lease.preempt, None))
        if what is None:
            lease.abandon()
        else:
            await self.call(partial(what, len(tokens)), lease)


async def serve(seed: int, groups: list[Any], seen: Counter[str]) -> None:
    """Clients of a small cache, with the tiers that the seed draws."""
    rng = random.Random(seed)
    tables: dict[str, Any] = {
        "cache": {"recompute_last_token": rng.random() < 0.5, "default_deadline_s": 5.0},
        "device_table": {"policy": rng.choice(("lru", "retain"))},
    }
    if any(group["slots"] for group in groups) or rng.random() < 0.5:
        mode = rng.choice(("exclusive", "inclusive"))
        slots, transit = rng.choice((4, 12)), rng.choice((2, 8))
        tables["host"] = {"slots": slots, "transit_slots": transit, "mode": mode}
        groups = [{**group, "slots": group["slots"] or 4} for group in groups]
    if rng.random() < 0.5:
        policy = rng.choice(("write_back", "write_through"))
        fetch = rng.random() < 0.8
        tables["storage"] = {"backend": "memory", "write_policy": policy, "fetch": fetch}
    async with opened(groups, device=rng.choice((20, 40)), inline=True, **tables) as cache:
        model = Model(cache)
        prompts = [
            [rng.randrange(9) for _ in range(rng.choice((3, 8, 9, 20, 31, 40)))] for _ in range(4)
        ]
        cuts = rng.choice((0, 0.1, 0.3))
        clients = [Client(model, f"{seed}.{n}", seen, cuts) for n in range(rng.choice((3, 10, 50)))]
        results = await asyncio.gather(
            *(client.run(8, prompts) for client in clients), return_exceptions=True
        )
        assert [one for one in results if one is not None] == []
        gc.collect()  # forgotten leases
        await asyncio.sleep(0)
        for one in (cache, *cache.groups.values()):
            assert {actor.incarnation for actor in one.system.supervisor.actors()} == {0}


@pytest.mark.parametrize("kind", GROUPS)
def test_every_call_may_be_cancelled_or_refused(kind):
    seen: Counter[str] = Counter()
    gc.disable()  # a finaliser may run at any point, also within the loop of virtual time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for seed in range(4):
                loop = SimLoop(seed, direct=(0, 0.5, 1)[seed % 3])
                simulate(partial(serve, seed, GROUPS[kind], seen), loop=loop)
    finally:
        gc.enable()
    assert min(seen["hits"], seen["cut"], seen["request NoRoom"]) > 0
