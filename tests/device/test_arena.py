"""Host memory: no thread accesses unmapped pages."""

from __future__ import annotations

import subprocess
import sys
import threading

import kvactors.device.arena as module
from kvactors.device.arena import Arena


def touching(arena, monkeypatch):
    """A thread that touches pages, held in its first piece. Yields the event that lets it go on,
    and the pieces touched."""
    begun, go_on, pieces = threading.Event(), threading.Event(), []

    def touch(address, size):
        pieces.append(size)
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(module, "touch", touch)
    thread = threading.Thread(target=arena.touch)
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
    monkeypatch.setattr(module, "TOUCH_PIECE", 4096)
    arena = Arena(8, 4096)
    thread, go_on, pieces = touching(arena, monkeypatch)
    arena.stop_touching()
    go_on.set()
    thread.join()
    assert pieces == [4096]
    arena.close()
    assert arena._map.closed


def test_a_closed_arena_is_not_touched(monkeypatch):
    arena = Arena(4, 4096)
    arena.close()
    monkeypatch.setattr(module, "touch", None)
    arena.touch()
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
