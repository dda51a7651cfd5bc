"""Host memory: no thread accesses unmapped pages."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

import kvactors
import kvactors.device.arena as module
from kvactors.device import arena as arenas
from kvactors.device import host
from kvactors.device.arena import Arena
from tests.support.cache import opened, settings


def touching(arena, monkeypatch):
    """A thread that touches pages, held in its first piece. Yields the event that lets it go on,
    and the pieces touched."""
    begun, go_on, pieces = threading.Event(), threading.Event(), []

    def touch(address, size):
        pieces.append(size)
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(module, "touch", touch)
    thread = threading.Thread(target=arena.fresh.touch)
    thread.start()
    assert begun.wait(60)
    return thread, go_on, pieces


def test_memory_that_a_thread_touches_stays_mapped(monkeypatch):
    arena = Arena(4, 4096)
    thread, go_on, _ = touching(arena, monkeypatch)
    try:
        arena.close()
        assert arena.kept
        assert not arena._map.closed
    finally:
        go_on.set()
        thread.join()


def test_touching_stops_at_the_next_piece(monkeypatch):
    monkeypatch.setattr(arenas, "PIECE", 4096)
    arena = Arena(8, 4096)
    thread, go_on, pieces = touching(arena, monkeypatch)
    arena.fresh.stop_touching()
    go_on.set()
    thread.join()
    assert pieces == [4096]
    arena.close()
    assert arena._map.closed


async def test_threads_share_the_pieces_of_fresh_memory(monkeypatch):
    """Each piece is touched once, and no thread waits while another is in a piece."""
    monkeypatch.setattr(arenas, "PIECE", 4096)
    monkeypatch.setattr(arenas.os, "sched_getaffinity", lambda _: range(3))
    together, pieces, threads = threading.Barrier(3), [], set()

    def touch(address, size):
        pieces.append((address, size))
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            together.wait(60)

    memory = arenas.FreshMemory([(0, 5 * 4096), (1 << 20, 4096 + 7)], touch)
    await arenas.bring_in(memory, inline=False)
    whole = [(n * 4096, 4096) for n in range(5)] + [(1 << 20, 4096), ((1 << 20) + 4096, 7)]
    assert sorted(pieces) == whole
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert not memory.busy


async def test_an_open_touches_the_memory_of_host_and_device_outside_the_loop(monkeypatch):
    touched = {}

    def touching(name):
        def touch(address, size):
            touched.setdefault(name, set()).add(threading.get_ident())

        return touch

    monkeypatch.setattr(module, "touch", touching("host"))
    monkeypatch.setattr(host, "touch", touching("device"))
    async with opened(device=4, host={"slots": 4}):
        assert set(touched) == {"host", "device"}
        assert threading.get_ident() not in touched["host"] | touched["device"]
    async with opened(device=0, host={"slots": 4}) as cache:
        touched.clear()
        await cache.set_num_blocks(4)
        assert set(touched) == {"device"}
        await cache.sleep(2)
        touched.clear()
        await cache.wake()
        assert set(touched) == {"host", "device"}
        assert threading.get_ident() not in touched["host"] | touched["device"]
    given = host.HostDevice(cache.device.layout, 4)
    touched.clear()
    async with kvactors.open(settings(device=4, host={"slots": 4}), given):
        assert set(touched) == {"host"}, "memory of a caller may hold something"


def test_a_closed_arena_is_not_touched(monkeypatch):
    arena = Arena(4, 4096)
    arena.close()
    monkeypatch.setattr(module, "touch", None)
    arena.fresh.touch()
    assert arena._map.closed


def test_memory_that_is_kept_outlives_its_arena():
    arena = Arena(4, 4096)
    memory = arena._map
    arena.keep()
    arena.close()
    del arena
    memory[0] = 1


def test_memory_that_cannot_be_locked_is_a_reason_of_health():
    """In a process whose limit of locked memory is zero."""
    script = """
import asyncio, ctypes, os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:  # root may lock any memory: leave that capability
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capset(header, data) == 0
import kvactors
def config(pinned):
    return {"cache": {"model": "m", "block_size": 4}, "device": {"num_blocks": 4},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4},
            "host": {"slots": 4, "pinned": pinned}}
async def main():
    for pinned in (False, True):
        async with kvactors.open(config(pinned)) as cache:
            health = cache.health()
            print(health.status, *(f"{one.component}: {one.why}" for one in health.reasons))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    plain, pinned = done.stdout.splitlines()
    assert plain == "ok"
    assert pinned.startswith("degraded host memory: host.pinned: the system refuses to lock")
    assert pinned.endswith("raise the limit of locked memory (ulimit -l)")


def huge_kib(address, size):
    """KiB of huge pages in the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < address + size and address < high
        elif inside and line.startswith("AnonHugePages:") and line.split()[1] != "0":
            return int(line.split()[1])
    return 0


def test_the_slots_are_in_huge_pages_where_the_system_gives_them(monkeypatch):
    arena = Arena(3, (2 << 20) - 5)
    assert arena.address % module.HUGE == 0
    assert arena.nbytes == 6 << 20
    arena.fresh.touch()
    if not arena.small_pages:
        assert huge_kib(arena.address, arena.nbytes) >= 2048
    last = arena.view(2)
    last[:] = b"x" * len(last)
    arena.close()
    small = Arena(3, 4096)
    assert "less than a huge page" in small.small_pages
    assert len(small._map) == small.nbytes
    small.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("always [madvise] never\n", ""), ("always madvise [never]\n", "is 'never'"), (None, "read")],
)
def test_a_system_without_huge_pages_is_logged_with_its_reason(tmp_path, monkeypatch, text, reason):
    path = tmp_path / "enabled"
    monkeypatch.setattr(module, "HUGE_PAGES", path)
    if text is not None:
        path.write_text(text)
    with structlog.testing.capture_logs() as logs:
        arena = Arena(1, 2 << 20)
    arena.view(0)[:] = bytes(2 << 20)
    arena.close()
    if reason:
        assert reason in arena.small_pages
        assert [one["reason"] for one in logs] == [arena.small_pages]
    else:
        assert "refuses" in arena.small_pages or not arena.small_pages


def test_an_advice_that_is_refused_leaves_small_pages(monkeypatch):
    monkeypatch.setattr(module, "huge_pages_off", lambda: "")
    monkeypatch.setattr(module.mmap, "MADV_HUGEPAGE", 12345)
    arena = Arena(1, 2 << 20)
    assert "refuses" in arena.small_pages
    arena.close()
