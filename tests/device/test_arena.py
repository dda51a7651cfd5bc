"""Host memory: no thread accesses unmapped pages."""

from __future__ import annotations

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
