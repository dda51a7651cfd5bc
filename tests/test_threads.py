"""Threads for blocking calls and copies: a low priority, and they give way to the loop's thread."""

from __future__ import annotations

import os
import threading

from kvactors import threads
from kvactors.data_plane.base import Direction
from kvactors.data_plane.engine import ThreadedCopies
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import MLALayout


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_threads_have_a_low_priority_and_give_way_and_the_loops_does_not(monkeypatch):
    begun: dict[str, int] = {}
    monkeypatch.setattr(
        threads,
        "work_in_background",
        lambda: begun.update({threading.current_thread().name: niceness()}),
    )
    before = niceness()
    workers = threads.Workers(1, "worker")
    workers.submit(int).result(10)
    workers.close()
    layout = MLALayout(4, 16)
    device, arena = HostDevice(layout, 2), Arena(2, layout.block_bytes)
    copies = ThreadedCopies(device, arena, 1)
    assert await copies.run(Direction.TO_HOST, [0, 1], [0, 1]) == ()
    await copies.close()
    assert begun == {"worker-0": threads.NICE, "kvactors-copy-0": threads.NICE}
    assert niceness() == before
