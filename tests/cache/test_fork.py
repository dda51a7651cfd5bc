"""A forked child has no effect on its parent's files, sockets and locks, however it leaves the
block."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import anyio
import pytest

import kvactors
from kvactors.data_plane.ranks.connection import Listener, connect
from tests.support.cache import BLOCK, prompt, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LONGEST = 30.0


def config(folder):
    return settings(
        host={"slots": 8, "transit_slots": 8},
        storage={
            "backend": "file",
            "directory": str(folder / "store"),
            "capacity_blocks": 64,
            "write_policy": "write_through",
        },
        sinks=(
            {"kind": "jsonl", "path": str(folder / "events.jsonl")},
            {
                "kind": "kv_events",
                "endpoint": f"ipc://{folder}/events",
                "replay_endpoint": f"ipc://{folder}/replay",
            },
        ),
    )


async def serve(cache, seed):
    async with await cache.acquire(f"r{seed}", prompt(seed, 2)) as lease:
        await lease.wait_ready()
        await lease.commit(2 * BLOCK)
    await cache.wait_flushed(LONGEST)


def resident(path) -> int:
    """Blocks on the device according to the file. Every line is whole."""
    held = set()
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        keys = set(record.get("keys", ()))
        if record["type"] != "epoch" and record["tier"] == "device":
            held = held | keys if record["residency"] == "resident" else held - keys
    return len(held)


async def in_thread(call, *arguments):
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


@pytest.mark.full
@pytest.mark.parametrize("how", ["leaves", "raises", "exits"])
def test_a_child_that_leaves_the_block_closes_nothing_and_raises_only_its_own(how, tmp_path):
    raised = {"leaves": None, "raises": ValueError, "exits": SystemExit}[how]

    async def main():
        child, outcome = -1, "left"
        listener = Listener(None)
        await listener.start(f"unix://{tmp_path}/ranks")
        try:
            async with kvactors.open(config(tmp_path)) as cache:
                await serve(cache, 1)
                held = await cache.acquire("held", prompt(9, 2))
                child = os.fork()
                if child:
                    with anyio.fail_after(LONGEST):
                        _, status = await in_thread(os.waitpid, child, 0)
                    assert status == 0
                    await serve(cache, 2)
                    await held.wait_ready()
                    await held.finish()
                    await cache.wait_flushed(LONGEST)
                    assert cache.health() == ("ok", ())
                    assert cache.check() == []
                    assert resident(tmp_path / "events.jsonl") == 4
                    with pytest.raises(kvactors.StoreError):  # the lock is held
                        async with kvactors.open(config(tmp_path)):
                            raise AssertionError("opened twice")
                elif raised is not None:
                    raise raised("the child's own")
        except BaseException as error:
            if child:
                raise
            outcome = "left" if raised is not None and type(error) is raised else repr(error)
        finally:
            if not child:
                os.write(2, outcome.encode())
                os._exit(outcome != "left")
        (await connect(f"unix://{tmp_path}/ranks")).close()
        await listener.stop()
        async with kvactors.open(config(tmp_path)) as cache:
            assert len(cache.system.backend.keys()) == 4

    asyncio.run(main())


SCRIPT = """
    import asyncio, os, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from tests.cache.test_fork import config, serve, resident
    import kvactors
    from kvactors.flush_notifier.sinks.memory import MemorySink
    folder = Path({folder!r})

    class Marking(MemorySink):
        async def close(self):
            (folder / "closed").touch()

    async def tick():
        while True:  # the child's end of the loop takes the parent's wake-up descriptor out of the epoll instance that both share
            await asyncio.sleep(0.02)

    async def main():
        ticking = asyncio.ensure_future(tick())
        async with kvactors.open(config(folder), sinks=[Marking("marking", 4)]) as cache:
            await serve(cache, 1)
            child = os.fork()
            if not child:
                sys.exit(7)  # through asyncio.run, which cancels every task of the parent's loop in the child
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                await asyncio.sleep(0.02)
            assert os.waitstatus_to_exitcode(ended[1]) == 7, ended
            assert resident(folder / "events.jsonl") == 2
            assert set(os.listdir(folder)) == {{"events", "replay", "store", "events.jsonl"}}, os.listdir(folder)
            try:
                async with kvactors.open(config(folder)):
                    raise AssertionError("opened twice")
            except kvactors.StoreError:
                print("parent works")
            sys.stdout.flush()
            os._exit(0)

    asyncio.run(main())
"""


@pytest.mark.full
def test_a_child_that_ends_the_parents_loop_writes_and_unlocks_nothing(tmp_path):
    script = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parents[2]), folder=str(tmp_path)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONGEST
    )
    assert done.stdout == "parent works\n", done.stderr
    assert done.returncode == 0


def test_the_exit_of_a_child_waits_for_no_thread_of_its_parent():
    script = """
        import os, threading, time
        from kvactors.threads import Workers
        workers, release = Workers(1, "kvactors-busy"), threading.Event()
        workers.submit(release.wait)
        child = os.fork()
        if not child:
            raise SystemExit(5)
        began = time.monotonic()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        release.set()
        print(status, time.monotonic() - began)
    """
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert found.stdout.startswith("5 "), found.stderr
    assert "Traceback" not in found.stderr
