"""`close` ends within `actors.drain_timeout_s` with any store, copy, sink or thread, and a forked child is
refused."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from contextlib import suppress

import pytest
import structlog

import kvactors
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.storage.memory import MemoryBackend
from kvactors.threads import Workers
from tests.support.cache import BLOCK, prompt, settings

DRAIN = 0.5
LONGEST = 20.0
"""Seconds that no end may take here: it bounds a hang, not a slow machine."""

HOST = {"slots": 8, "transit_slots": 8}
STORE = {"backend": "memory", "write_policy": "write_through"}


class HungDisk(MemoryBackend):
    """Every write waits in a thread until `release` is set, cancelled or not."""

    def __init__(self, release):
        super().__init__(b"f" * 32, 2 * BLOCK * 16)
        self.release = release
        self.begun = threading.Event()
        self.threads = Workers(2, "kvactors-hung")

    async def save(self, key, data):
        def call():
            self.begun.set()
            self.release.wait()

        await wait_uncancelled(asyncio.wrap_future(self.threads.submit(call)))
        return await super().save(key, data)

    async def close(self):
        self.threads.close()


class Stubborn(MemorySink):
    """Neither ends when it is cancelled."""

    def __init__(self, where):
        super().__init__(MemorySinkConfig(name=f"stubborn {where}"), BLOCK)
        self.where = where
        self.calls = 0

    async def never(self):
        self.calls += 1
        until = time.monotonic() + 3 * LONGEST
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                if self.where != "deliver twice":
                    raise
                self.where = "deliver"

    async def deliver(self, tasks):
        if self.where.startswith("deliver"):
            await self.never()
        await super().deliver(tasks)

    async def close(self):
        if self.where == "close":
            await self.never()
        if self.where == "close raises":
            raise RuntimeError("no close")
        if self.where == "close leaks":
            raise asyncio.CancelledError("leaked")


async def one_request(cache):
    async with await cache.acquire("a", prompt(1, 3)) as lease:
        await lease.wait_ready()
        await lease.commit(3 * BLOCK)


def config(**tables):
    return settings(host=HOST, actors={"drain_timeout_s": DRAIN}, **tables)


def test_it_ends_in_time_while_a_disk_hangs_and_memory_in_use_stays_mapped():
    release = threading.Event()
    backend = HungDisk(release)

    async def main():
        began = time.monotonic()
        async with kvactors.open(config(storage=STORE), backend=backend) as cache:
            arena = cache.system.arena
            await one_request(cache)
            await asyncio.get_running_loop().run_in_executor(None, backend.begun.wait)
        assert time.monotonic() - began < LONGEST
        assert {task.get_name() for task in asyncio.all_tasks()} == {
            asyncio.current_task().get_name()
        }
        return arena

    with structlog.testing.capture_logs() as logs:
        arena = asyncio.run(main())
    assert arena.kept
    assert any("stays mapped" in record["event"] for record in logs)
    arena._map[0] = 1  # still there
    release.set()


def test_it_ends_in_time_while_a_copy_hangs():
    release, begun = threading.Event(), threading.Event()

    async def main():
        async with kvactors.open(config()) as cache:
            arena = cache.system.arena
            copy = cache.device.copy_to_host

            def hung(*arguments):
                begun.set()
                release.wait()
                copy(*arguments)

            cache.device.copy_to_host = hung
            for seed in range(2):
                async with await cache.acquire("a", prompt(seed, 3)) as lease:
                    await lease.commit(3 * BLOCK)
            with suppress(kvactors.DeadlineExceeded):
                await cache.acquire("b", prompt(3, 3), deadline=0.1)
            await asyncio.get_running_loop().run_in_executor(None, begun.wait)
            began = time.monotonic()
        assert time.monotonic() - began < LONGEST
        assert arena.kept

    asyncio.run(main())
    release.set()


@pytest.mark.parametrize(
    "where", ["deliver", "deliver twice", "close", "close raises", "close leaks"]
)
def test_close_ends_in_time_with_any_sink_and_raises_nothing(where):
    sink = Stubborn(where)

    async def main():
        async with kvactors.open(config(sinks=()), sinks=[sink]) as cache:
            await one_request(cache)
            for _ in range(50):
                await asyncio.sleep(0)
            began = time.monotonic()
        assert time.monotonic() - began < LONGEST
        assert not cache.system.arena.kept or where == "close"

    asyncio.run(main())


async def test_a_closed_cache_is_collectable_at_once():
    """Its timers are cancelled, with deadlines of an hour too."""
    async with kvactors.open(config(storage=STORE, cache={"default_deadline_s": 3600.0})) as cache:
        await one_request(cache)
        lease = await cache.acquire("held", prompt(2, 2))
        system, index = weakref.ref(cache.system), weakref.ref(cache.system.index_actor)
        await lease.finish()
    del cache, lease
    gc.collect()
    assert system() is None
    assert index() is None


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    async def main():
        async with kvactors.open(config()) as cache:
            await one_request(cache)
            lease = await cache.acquire("held", prompt(3, 1))
            read, write = os.pipe()
            child = os.fork()
            if not child:
                # The parent's loop seems to run on: a call of a lease steps in its thread.
                os._exit(in_child(cache, lease, write))
            os.close(write)
            with os.fdopen(read) as answers:
                text = await asyncio.get_running_loop().run_in_executor(None, answers.read)
            _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            await one_request(cache)
            assert status == 0
            assert text.split() == ["CacheClosed"] * 4
            await lease.finish()

    asyncio.run(main())


def in_child(cache, lease, write):
    """The errors of four calls: in the parent's step, from a loop of the child, and from a thread
    without one."""

    async def call(work):
        try:
            await work
        except Exception as error:
            os.write(write, type(error).__name__.encode() + b" ")

    def calls():
        asyncio.run(call(cache.acquire("child", [1, 2, 3])))
        asyncio.run(call(cache.wait_idle()))
        try:
            cache.from_thread.clear()
        except Exception as error:
            os.write(write, type(error).__name__.encode() + b" ")

    with suppress(StopIteration):
        call(lease.wait_ready()).send(None)
    thread = threading.Thread(
        target=calls
    )  # the forking thread is inside the copy of a running loop
    thread.start()
    thread.join(LONGEST)
    return int(thread.is_alive())
