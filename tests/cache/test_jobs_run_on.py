"""An actor fails while a job of it does not end: it restarts in a bounded time, and no memory that
the job accesses is used again before."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import structlog

import kvactors
from kvactors.actor import ActorRef
from kvactors.actor.clock import now
from kvactors.actor.context import JOB_LIMIT, MEMORY_LIMIT
from kvactors.cpu_evictor.slots import HostTier, SlotState
from kvactors.device.arena import Arena
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import ProbeStore, Write
from kvactors.testing.loop import simulate
from tests.support.cache import BLOCK, opened, prompt, serve

HOST, STORE = (
    {"slots": 6, "transit_slots": 6},
    {"backend": "memory", "write_policy": "write_back", "readers": 1, "writers": 1},
)


class Hanging:
    """Calls of a store that do not return, cancelled or not, until `release` is set. Then they
    continue with the memory that they were given."""

    def __init__(self, what, monkeypatch):
        self.release = asyncio.Event()
        self.views = []
        self.written = []
        self.armed = False
        plain = getattr(MemoryBackend, what)

        async def call(store, key, view):
            hung = self.armed
            if hung:
                self.views.append(view)
                while not self.release.is_set():
                    with suppress(asyncio.CancelledError):
                        await self.release.wait()
                self.written.append((key, bytes(view)))
            return await plain(store, key, view)

        monkeypatch.setattr(MemoryBackend, what, call)


async def request(cache, seed, blocks=2):
    """Serve one request and check its blocks. Returns the number of cached ones."""
    lease = await serve(cache, f"r{seed}", prompt(seed, blocks), deadline=2.0)
    return lease.cached_tokens // BLOCK


async def break_actor(ref: ActorRef, message) -> None:
    """Make an actor fail by a message that it cannot handle."""
    ref.try_tell(message)
    await asyncio.sleep(0.1)


READER, WRITER = ("storage_reader-0", ProbeStore), ("storage_writer-0", Write)


@pytest.mark.parametrize(
    ("what", "victim"),
    [("load", "reader"), ("save", "writer"), ("load", "evictor"), ("save", "evictor")],
)
def test_slots_that_a_call_to_a_store_accesses_are_not_handed_out_before_it_ends(
    what, victim, monkeypatch
):
    async def main():
        hanging = Hanging(what, monkeypatch)
        async with opened(
            inline=True, host=HOST, storage=STORE, actors={"drain_timeout_s": 2.0}
        ) as cache:
            system = cache.system
            for seed in range(12):  # through device and host into the store
                await request(cache, seed)
            await cache.wait_idle()
            hanging.armed = True
            if what == "load":
                await request(cache, 0)
            else:
                for seed in range(20, 26):
                    await request(cache, seed)
            assert hanging.views
            arena, began = system.arena, now()
            ref = {
                "reader": system.readers[0],
                "writer": system.writers[0],
                "evictor": system.evictor,
            }[victim]
            incarnation = ref.incarnation
            await break_actor(
                ref,
                Write(1, b"", (), "no deadline", 0)
                if victim == "reader"
                else ProbeStore(1, b"", 0.0),
            )
            while (
                ref.incarnation == incarnation
                or system.supervisor.actor(ref.name).state.name != "RUNNING"
            ):
                await asyncio.sleep(0.1)
                assert now() - began < 2 * JOB_LIMIT
            hanging.armed = False
            in_use = set(arena.in_use)
            assert len(in_use) >= len(hanging.views)
            before = [bytes(view) for view in hanging.views]
            for seed in range(40, 60):  # requests are served in the other slots
                await request(cache, seed)
            host = system.evictor_actor.host
            assert not {entry.slot for entry in host.blocks.values()} & in_use
            assert [bytes(view) for view in hanging.views] == before
            assert cache.check() == []
            hanging.release.set()
            await asyncio.sleep(1.0)
            assert not arena.in_use
            await cache.wait_idle()
            assert host.free + host.resident == host.num_slots
            if victim == "evictor":
                await cache.clear(storage=True)
            for seed in range(60, 66):
                await request(cache, seed)
        if what == "save":  # what it wrote is what it was given, not what came into its slot later
            assert before
            assert set(before) <= {data for _, data in hanging.written}

    with structlog.testing.capture_logs() as logs:
        simulate(main)
    assert [one["seconds"] for one in logs if one["event"] == "jobs do not end"][:1] == [JOB_LIMIT]


@pytest.mark.parametrize("ends", [True, False])
def test_copies_that_do_not_end_after_a_failure_end_the_cache_in_time(ends, monkeypatch):
    async def main():
        release = asyncio.Event()
        plain = kvactors.data_plane.engine.InlineCopies.run

        async def run(executor, *arguments):
            began.append(now())
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await release.wait()
            return await plain(executor, *arguments)

        began = []
        monkeypatch.setattr("kvactors.data_plane.engine.InlineCopies.run", run)
        async with opened(inline=True, host=HOST, actors={"drain_timeout_s": 2.0}) as cache:
            for seed in range(4):
                await request(cache, seed)
            with suppress(kvactors.DeadlineExceeded):
                await request(cache, 5)
            assert began
            failed_at = now()
            await break_actor(cache.system.evictor, ProbeStore(1, b"", 0.0))
            if ends:
                release.set()
                while cache.health().status != "ok":
                    await asyncio.sleep(0.1)
                    assert now() - failed_at < JOB_LIMIT
                assert await request(cache, 7) == 0
                return
            assert [one.why for one in cache.health().reasons] == ["restarting after a failure"] * 2
            while cache.health().status != "failed":
                await asyncio.sleep(1.0)
                assert now() - failed_at < 2 * MEMORY_LIMIT
            with pytest.raises(
                kvactors.CacheFailed, match="copies have not ended 60 s after a failure"
            ):
                await cache.acquire("a", prompt(1, 1))
            release.set()

    with structlog.testing.capture_logs():
        if ends:
            simulate(main)
        else:
            with pytest.raises(kvactors.CacheFailed, match="gpu_swapper"):
                simulate(main)


def test_slots_in_use_are_withheld_and_come_back():
    arena = Arena(4, 64)
    first, second = arena.withhold([1, 2]), arena.withhold([2])
    tier = HostTier(4, 4, arena.in_use)
    assert tier.free == 2
    entries = [tier.add(bytes([i]) * 32, b"", SlotState.RESIDENT) for i in range(2)]
    assert sorted(entry.slot for entry in entries) == [0, 3]
    third = arena.withhold([entries[0].slot])
    for entry in entries:
        entry.arriving = False
        tier.unpin(entry)
        tier.drop(entry)
    tier.check()
    assert tier.free == 1
    first()
    assert tier.free == 2
    tier.check()
    second()
    third()
    assert tier.free == 4
    assert not arena.in_use
    tier.check()
    arena.close()
