"""Opening, use and closing of a cache under cancellation at every step: nothing is left behind, and
the cancellation is delivered."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import anyio
import pytest

import kvactors
from tests.support.cache import BLOCK, prompt, settings

STEPS = [*range(0, 30, 2), *range(30, 400, 9)]
"""Steps of the loop at which a task is cancelled. Closing takes the later ones."""


def config_of(kind: str, folder: Path) -> kvactors.Config:
    host = {"slots": 8, "transit_slots": 8}
    if kind == "memory":
        return settings(host=host, storage={"backend": "memory", "write_policy": "write_through"})
    if kind == "file":
        store = {"backend": "file", "directory": str(folder), "write_policy": "write_through"}
        return settings(host=host, storage=store)
    return settings(host=host, sinks=({"kind": "kv_events", "endpoint": f"ipc://{folder}/events"},))


EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _earlier_threads():
    """Threads that tests before this one have left do not count."""
    EARLIER.update(threading.enumerate())
    yield
    EARLIER.clear()


async def use(config: kvactors.Config) -> None:
    async with kvactors.open(config) as cache:
        tokens = prompt(1, 3)
        async with await cache.acquire("a", tokens) as lease:
            await lease.wait_ready()
            await lease.commit(3 * BLOCK)
        await asyncio.sleep(0)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def nothing_is_left(fds: int) -> None:
    """Threads and descriptors of the runtime end a moment after their owners: 10 seconds bound a
    leak, not a slow machine."""
    assert asyncio.all_tasks() == {asyncio.current_task()}
    until = time.monotonic() + 10
    while time.monotonic() < until:
        gc.collect()
        threads = [
            t.name
            for t in threading.enumerate()
            if t.name.startswith("kvactors") and t not in EARLIER
        ]
        if not threads and descriptors() <= fds:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"left behind: threads {threads}, descriptors {fds} -> {descriptors()}")


async def cancelled_at(step: int, how: str, config: kvactors.Config) -> bool:
    """Whether the task was still running at its step."""
    scope = anyio.CancelScope()

    async def run() -> None:
        if how == "anyio scope":
            with scope:
                await use(config)
                await asyncio.sleep(0)  # where anyio delivers what was shielded before
        else:
            await use(config)

    task = asyncio.create_task(run())
    for _ in range(step):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    if how == "anyio scope":
        scope.cancel()
    else:
        task.cancel()
    if how == "twice":
        for _ in range(1 + step % 11):
            await asyncio.sleep(0)
        task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if how == "anyio scope":
        assert result is None
        assert scope.cancelled_caught
    else:
        assert isinstance(result, asyncio.CancelledError)
    return True


@pytest.mark.parametrize("how", ["once", "twice", "anyio scope"])
@pytest.mark.parametrize(
    "kind", ["memory", "file", pytest.param("kv_events", marks=pytest.mark.full)]
)
async def test_cancelled_at_any_step_nothing_is_left_and_it_opens_again(kind, how, tmp_path):
    config = config_of(kind, tmp_path)
    await use(config)
    await nothing_is_left(descriptors())
    fds = descriptors()
    running = 0
    for step in STEPS:
        if not await cancelled_at(step, how, config):
            break
        running += 1
        await nothing_is_left(fds)
    assert running > 5  # threads take part: how many steps there are depends on the machine
    await use(config)  # the store's lock is free


CHILD = """
    import asyncio, os, signal, sys, threading
    import kvactors
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with SIGINT ignored
    config = kvactors.Config.from_mapping({{
        "cache": {{"block_size": 16}}, "device": {{"num_blocks": 8}},
        "layout": {{"kind": "gqa", "num_layers": 4, "num_kv_heads": 4, "head_dim": 128}},
        "host": {{"slots": 4000}},
    }})
    touched = threading.Event()
    from kvactors.device.arena import FreshMemory
    touch = FreshMemory.touch
    def patched(self):
        touched.set()
        touch(self)
    FreshMemory.touch = patched

    async def main():
        def interrupt():
            touched.wait()
            for _ in range({times}):
                os.kill(os.getpid(), signal.SIGINT)
                import time; time.sleep(0.02)
        threading.Thread(target=interrupt, daemon=True).start()
        {body}
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted")
"""

OPEN = "async with kvactors.open(config) as cache: await asyncio.sleep(60)"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_arena_is_touched_ends_the_process_in_order(times):
    program = textwrap.dedent(CHILD).format(times=times, body=OPEN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.split()[-1] == "interrupted"


IN_NATIVE_CODE = """
    import sys, threading
    import numpy as np
    from kvactors import native, threads
    threads.EXIT_LIMIT_S = 0.0  # the exit does not wait
    memory = np.zeros(256 << 20, np.uint8)
    started = threading.Event()
    def work():
        while True:
            started.set()
            {call}
    threading.Thread(target=work, daemon=True).start()
    started.wait()
    print("ends")
"""


@pytest.mark.parametrize(
    "call",
    [
        "native.touch(memory.ctypes.data, memory.nbytes)",
        "native.copy_bytes(memory.ctypes.data, memory.ctypes.data + (128 << 20), 128 << 20)",
        "native.Path(16, bytes(32)).extend(np.zeros(1 << 22, np.uint32))",
    ],
)
def test_a_thread_in_native_code_does_not_abort_the_exit(call):
    """A daemon thread asks for the GIL after the interpreter has begun to finalize."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(IN_NATIVE_CODE).format(call=call)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout.split()) == (0, ["ends"]), done.stderr[-2000:]
