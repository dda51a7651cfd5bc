"""Forks of leases: full blocks are shared, a last block that is not full is copied, and each branch
has its own bytes."""

from __future__ import annotations

import asyncio
import threading

import pytest

import kvactors
from kvactors.errors import DeadlineExceeded, DeviceError, LeaseEnded, NoRoom
from kvactors.prefix_index.messages import Fork
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 16, "transit_slots": 16}


def token_bytes(cache, block: int) -> list[int]:
    """The first bytes of a device block in the first region, one for each of its tokens."""
    piece = cache.device.layout.pieces[0]
    memory = cache.device.region(piece.layer, piece.role)
    return [int(row[0]) for row in memory[block].reshape(BLOCK, -1)]


def compute(cache, lease, start: int, stop: int, value: int) -> None:
    """Write tokens [start, stop) of a lease in every region."""
    for piece in cache.device.layout.pieces:
        memory = cache.device.region(piece.layer, piece.role)
        for position in range(start, stop):
            block = lease.block_table[position // BLOCK]
            memory[block].reshape(BLOCK, -1)[position % BLOCK] = value


def branch(cache, lease) -> list[int]:
    """The bytes of a lease's tokens."""
    found: list[int] = []
    for block in lease.block_table:
        found += token_bytes(cache, block)
    return found[: lease.num_tokens]


@pytest.mark.parametrize("first", ["parent", "fork"])
@pytest.mark.parametrize("committed", [0, 1, 2])
async def test_a_shared_block_is_free_after_both_leases(first, committed):
    async with opened(device=8) as cache:
        lease = await cache.acquire("a", prompt(1, 2))
        await lease.commit(committed * BLOCK)
        fork = await lease.fork()
        assert fork.block_table == lease.block_table
        assert cache.statistics().prefix.tails_copied == 0
        one, other = (lease, fork) if first == "parent" else (fork, lease)
        await one.finish()
        assert cache.statistics().prefix.blocks_free == 6
        await serve(cache, "c", prompt(2, 4))
        assert set(other.block_table).isdisjoint(await table_of(cache, prompt(3, 2)))
        await other.finish()


async def table_of(cache, tokens):
    async with await cache.acquire("x", tokens) as lease:
        return lease.block_table


def holds_back(monkeypatch, device, call: str) -> threading.Event:
    """The device's copies of a kind begin when the event is set."""
    may_copy, copy = threading.Event(), getattr(device, call)

    def held_back(*arguments):
        may_copy.wait(30)
        copy(*arguments)

    monkeypatch.setattr(device, call, held_back)
    return may_copy


async def test_blocks_of_a_load_without_a_lease_are_waited_for(monkeypatch):
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", tokens := prompt(1, 4))
        await serve(cache, "b", prompt(2, 8))
        await cache.wait_idle()
        may_load = holds_back(monkeypatch, cache.device, "copy_to_device")
        (await cache.acquire("a", tokens)).abandon()
        waiting = asyncio.ensure_future(cache.acquire("c", prompt(3, 8)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        may_load.set()
        await (await waiting).finish()


@pytest.mark.parametrize("ends", ["deadline", "cancel", "finish", "abandon", "clear"])
async def test_a_fork_that_waits_for_others_ends(ends):
    async with opened(device=6) as cache:
        lease = await cache.acquire("a", prompt(1, 1, tail=1))
        other = await cache.acquire("b", prompt(2, 3))
        deadline = 0.05 if ends == "deadline" else None
        forks = asyncio.ensure_future(lease.fork_many(4, wait_for_room=True, deadline=deadline))
        await asyncio.sleep(0.01)
        assert cache.statistics().prefix.waiting == 1
        error: type[BaseException] = LeaseEnded
        if ends == "cancel":
            forks.cancel()
            error = asyncio.CancelledError
        elif ends == "deadline":
            error = kvactors.DeadlineExceeded
        elif ends == "finish":
            await lease.finish()
        elif ends == "abandon":
            lease.abandon()
        else:
            await cache.clear()
            await other.finish()
            for fork in await forks:
                await fork.finish()
        if ends != "clear":
            with pytest.raises(error):
                await forks
            await cache.wait_idle()
            await other.finish()
        assert cache.statistics().prefix.waiting == 0
        if ends in ("deadline", "cancel", "clear"):
            await (await lease.fork()).finish()
            await lease.finish()


async def test_a_fork_that_is_answered_to_a_cancelled_caller_ends(queued, monkeypatch):
    async with opened(device=8) as cache:
        lease = await cache.acquire("a", prompt(1, 2))
        handlers = cache.system.index_actor.handlers
        fork = handlers[Fork]

        def answered(message, envelope):
            fork(message, envelope)
            call.cancel()

        monkeypatch.setitem(handlers, Fork, answered)
        call = asyncio.ensure_future(lease.fork())
        with pytest.raises(asyncio.CancelledError):
            await call
        await cache.wait_idle()
        assert cache.statistics().prefix.leases == 1
        await lease.finish()


async def test_loads_in_flight_are_waited_for_by_both(monkeypatch):
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", tokens := prompt(1, 4))
        await serve(cache, "b", prompt(2, 8))
        may_load = holds_back(monkeypatch, cache.device, "copy_to_device")
        lease = await cache.acquire("a", tokens)
        assert lease.pending
        fork = await lease.fork()
        again = await fork.fork()
        assert fork.pending
        assert again.pending
        may_load.set()
        for one in (again, lease, fork):
            await one.wait_ready()
            assert (one.cached_tokens, one.hits.host) == (3 * BLOCK, 3)
            assert cache.device.check(list(one.block_table[:3]), one.hashes(0, 3)) == []
        assert again.block_table == lease.block_table
        for one in (lease, fork, again):
            await one.finish()
        assert cache.statistics().prefix.host_hits == 3


async def test_salt_media_and_hints_are_inherited():
    tokens, media = prompt(1, 1, tail=1), [(1, 2, "image")]
    async with opened(device=16) as cache:
        lease = await cache.acquire(
            "a", tokens, salt="s", extra_keys=media, hints=kvactors.Hints(priority=1)
        )
        fork = await lease.fork()
        assert fork.hashes(0, 1) == lease.hashes(0, 1)
        states = {one.id: one for one in cache.system.index_actor.leases}
        assert {one.hints for one in states.values()} == {kvactors.Hints(priority=1)}
        await fork.extend([9] * 3, extra_keys=[(0, 2, "other")])
        await lease.extend([9] * 3)
        assert fork.hashes(0, 2) != lease.hashes(0, 2)
        with pytest.raises(ValueError, match="media item"):
            await fork.truncate(2)
        await lease.finish()
        await fork.finish()


async def test_the_copy_waits_for_the_event_and_a_failed_one_changes_nothing():
    async with opened(device=8) as cache:
        lease = await cache.acquire("a", prompt(1, 1, tail=1))
        computed = asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(lease.fork(event=computed))
        for _ in range(5):
            await asyncio.sleep(0)
        assert cache.statistics().prefix.forks == 0
        compute(cache, lease, 0, 5, 3)
        computed.set_result(None)
        fork = await call
        assert branch(cache, fork) == [3] * 5
        broken = asyncio.get_running_loop().create_future()
        broken.set_exception(RuntimeError("the kernel failed"))
        with pytest.raises(DeviceError):
            await lease.fork(event=broken)
        with pytest.raises(DeadlineExceeded):
            await lease.fork(event=asyncio.get_running_loop().create_future(), deadline=0.01)
        assert cache.statistics().prefix.forks == 1
        await lease.finish()
        await fork.finish()


async def test_a_copy_that_fails_changes_nothing(monkeypatch):
    async with opened(device=8) as cache:
        lease = await cache.acquire("a", prompt(1, 1, tail=1))

        def refuse(sources, targets):
            raise OSError("no copy")

        monkeypatch.setattr(cache.device, "copy_blocks", refuse)
        with pytest.raises(DeviceError, match="could not be copied"):
            await lease.fork_many(3)
        prefix = cache.statistics().prefix
        assert (prefix.leases, prefix.blocks_free, prefix.blocks_shared) == (1, 6, 0)
        await lease.finish()


async def test_many_forks_of_a_long_prompt_go_in_several_messages(monkeypatch):
    monkeypatch.setattr("kvactors.lease.FORK_TURN_BLOCKS", 9)
    async with opened(device=12) as cache:
        lease = await cache.acquire("a", prompt(1, 3, tail=1))
        forks = await lease.fork_many(5, [f"b{i}" for i in range(5)])
        assert [fork.request_id for fork in forks] == [f"b{i}" for i in range(5)]
        with pytest.raises(NoRoom):
            await lease.fork_many(4)
        await cache.wait_idle()
        assert cache.statistics().prefix.leases == 6
        for one in (lease, *forks):
            await one.finish()
