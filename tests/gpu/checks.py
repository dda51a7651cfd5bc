"""Checks with real bytes on a GPU. Each raises `Wrong` when a byte or a count is not right."""

from __future__ import annotations

import asyncio
import ctypes
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import numpy as np

import kvactors
from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout, make_layout
from kvactors.settings import Config
from kvactors.tier_cache import CopyWorker, SlotMemory
from tests.gpu.common import LIMIT, Wrong, ensure, settings
from tests.gpu.streams import loads_under_a_stream, ordered_calls
from tests.support.cuda_stand import Stand, opened

BLOCKS = 16
LAYOUTS: dict[str, Layout] = {
    "1090 bytes": GQALayout(2, 1, 10, 109, "uint8"),
    "1 KiB": GQALayout(3, 2, 16, 16, "float16"),
    "64 KiB": GQALayout(2, 8, 128, 32, "float16"),
    "MLA": MLALayout(3, 64),
    "DSA": DSALayout(3, 64),
    "layers that differ": GQALayout(3, [2, 1, 8], [10, 128, 64], 32, "float16"),
}
WAYS: dict[str, dict[str, int]] = {
    "default": {},
    "copy engines": {"batch_from": 0},
    "kernel": {"batch_from": 1 << 40},
}


async def copies(driver: CudaDriver) -> str:
    """Every layout by every way, blocks in order and shuffled, there and back."""
    rng = np.random.default_rng(7)
    for name, layout in LAYOUTS.items():
        for way, options in WAYS.items():
            async with opened(
                Stand(driver, layout, blocks=BLOCKS, slots=BLOCKS, **options)
            ) as bench:
                for shuffled in (False, True):
                    ids = rng.permutation(BLOCKS)[:9].tolist() if shuffled else list(range(3, 12))
                    slots = rng.permutation(BLOCKS)[:9].tolist() if shuffled else list(range(9))
                    try:
                        await bench.there_and_back(ids, slots)
                    except Wrong as error:
                        raise Wrong(f"{name}, {way}: {error}") from None
    return f"{len(LAYOUTS)} layouts, {len(WAYS)} ways"


async def events(driver: CudaDriver) -> str:
    """An engine's stream waits for each layer of a load, and finds its bytes."""
    layout = LAYOUTS["1 KiB"]
    for way in ("copy engines", "kernel"):
        async with opened(Stand(driver, layout, blocks=BLOCKS, slots=BLOCKS, **WAYS[way])) as bench:
            device, size = bench.device, int(bench.device.piece_bytes[0])
            bench.device.fill(range(BLOCKS), bench.names)
            await bench.copy(Direction.TO_HOST, range(BLOCKS), range(BLOCKS))
            expected = ctypes.string_at(bench.arena.address, size)
            bench.device.fill(range(BLOCKS), bytes(32 * BLOCKS))
            with device.current():
                stream, host = (
                    driver.read("cuStreamCreate", 1),
                    driver.read("cuMemHostAlloc", size, 3),
                )
            numbers = list(range(BLOCKS))
            running = asyncio.ensure_future(
                bench.executor.run(Direction.TO_DEVICE, numbers, numbers)
            )
            waits = False
            while not running.done() and not waits:
                await asyncio.sleep(0)
                waits = bench.executor.make_stream_wait(stream, [0], 0)
            with device.current():
                driver.call("cuMemcpyDtoHAsync", host, int(device.regions[0]), size, stream)
                driver.call("cuStreamSynchronize", stream)
                found = ctypes.string_at(host, size)
                driver.call("cuMemFreeHost", host)
                driver.call("cuStreamDestroy", stream)
            ensure(await running == (), "the load failed")
            ensure(not waits or found == expected, f"{way}: the stream did not wait")
    return "2 ways"


async def cancelled(driver: CudaDriver) -> str:
    """A cancelled batch ends before it returns, and later batches are right."""
    count = 0
    for way in ("copy engines", "kernel"):
        async with opened(
            Stand(driver, LAYOUTS["64 KiB"], blocks=BLOCKS, slots=BLOCKS, **WAYS[way])
        ) as bench:
            numbers = list(range(BLOCKS))
            bench.device.fill(numbers, bench.names)
            for _ in range(20):
                running = asyncio.ensure_future(
                    bench.executor.run(Direction.TO_HOST, numbers, numbers)
                )
                await asyncio.sleep(0)
                running.cancel()
                try:
                    await running
                except asyncio.CancelledError:
                    count += 1
            await bench.copy(Direction.TO_HOST, numbers, numbers)
            bench.device.fill(numbers, bytes(32 * BLOCKS))
            await bench.copy(Direction.TO_DEVICE, numbers, numbers)
            ensure(not bench.device.check(numbers, bench.names), f"{way}: other bytes")
    return f"{count} of 40 cancelled"


async def served(cache: kvactors.KVCache, devices: Sequence[CudaDevice], rounds: int) -> int:
    """Prompts that displace one another. Wrong unless each hit has its bytes. Returns the hits."""
    hits = 0
    for seed in [1, 2, 3] * rounds:
        async with await cache.acquire("r", [seed] * 49) as lease:
            await lease.wait_ready()
            cached, keys = lease.cached_tokens // 16, lease.hashes(0, 3)
            for device in devices:
                wrong = device.check(lease.block_table[:cached], keys[: 32 * cached])
                ensure(not wrong, f"prompt {seed}: cached blocks {wrong} have other bytes")
                device.fill(lease.block_table[cached:3], keys[32 * cached :])
            await lease.commit(48)
            hits += cached
        await cache.wait_idle()
    ensure(cache.check() == [], f"the cache is inconsistent: {cache.check()}")
    return hits


async def cache(driver: CudaDriver) -> str:
    """A cache in the GPU's memory, with host memory and a file store below."""
    with tempfile.TemporaryDirectory() as folder:
        store = {"backend": "file", "directory": folder, "capacity_blocks": 64}
        config = Config.from_mapping(settings(host={"slots": 4}, storage=store))
        device = CudaDevice.allocate(make_layout(config.layout, 16), 6, driver=driver)
        try:
            async with kvactors.open(config, device=device) as opened_cache:
                hits = await served(opened_cache, [device], 6)
        finally:
            device.close()
    ensure(hits > 0, "nothing was loaded")
    return f"{hits} blocks from the tiers"


async def sleeping(driver: CudaDriver) -> str:
    """Device memory is given back while a cache sleeps, and blocks come back to new memory."""
    config = Config.from_mapping(settings())
    layout = make_layout(config.layout, 16)
    hits = 0
    with ExitStack() as cleanup:
        device = CudaDevice.allocate(layout, 6, driver=driver)
        cleanup.callback(device.close)
        async with kvactors.open(config, device=device) as opened_cache:
            for level in (1, 2):
                await served(opened_cache, [device], 2)
                await opened_cache.sleep(level)
                device.close()
                device = CudaDevice.allocate(layout, 6, driver=driver)
                cleanup.callback(device.close)
                await opened_cache.wake(device)
                before = opened_cache.statistics().host_hits
                hits += await served(opened_cache, [device], 1)
                found = opened_cache.statistics().host_hits - before
                ensure(level == 2 or found > 0, "nothing came back after the sleep")
    return f"2 levels, {hits} blocks after them"


async def ranks(driver: CudaDriver) -> str:
    """Two ranks with a share of each block, on one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/ranks"
        layout = {**settings()["layout"], "tensor_parallel": 2}
        config = Config.from_mapping(
            settings(layout=layout, ranks={"count": 2, "endpoint": endpoint})
        )
        devices = [
            CudaDevice.allocate(make_layout(config.layout, 16), 6, driver=driver) for _ in range(2)
        ]
        try:
            async with anyio.create_task_group() as tasks:
                for rank, device in enumerate(devices):
                    tasks.start_soon(_serve, endpoint, device, rank, config)
                async with kvactors.open(config) as opened_cache:
                    hits = await served(opened_cache, devices, 4)
                tasks.cancel_scope.cancel()
        finally:
            for device in devices:
                device.close()
    ensure(hits > 0, "nothing was loaded")
    return f"2 ranks, {hits} blocks from the host"


async def _serve(endpoint: str, device: CudaDevice, rank: int, config: Config) -> None:
    await kvactors.serve_rank(endpoint, device, rank=rank, ranks=2, config=config)


async def worker(driver: CudaDriver) -> str:
    """Copies without an event loop, as engines make them that have their own tiers."""
    with ExitStack() as cleanup:
        device = CudaDevice.allocate(GQALayout(4, 1, 16, 8, "uint8"), BLOCKS, driver=driver)
        cleanup.callback(device.close)
        keys = np.random.default_rng(5).bytes(32 * BLOCKS)
        device.fill(range(BLOCKS), keys)
        memory = SlotMemory(BLOCKS, int(device.piece_bytes.sum()))
        tensors = [
            one._replace(shape=(BLOCKS, int(np.prod(one.shape[1:])))) for one in device.tensors
        ]
        copier = CopyWorker(tensors, memory, driver=driver)
        numbers = list(range(BLOCKS))
        cleanup.callback(copier.shutdown)
        for job, submit in (("store", copier.submit_store), ("load", copier.submit_load)):
            submit(job, numbers, numbers, stream=0)
            ensure(copier.wait([job], LIMIT), f"the {job} has not ended")
            errors = [one.error for one in copier.get_finished() if one.error]
            ensure(not errors, f"the {job} failed: {errors}")
            if job == "store":
                device.fill(numbers, bytes(32 * BLOCKS))
        ensure(not device.check(numbers, keys), "other bytes came back")
        ensure(copier.shutdown(), "copies did not end")
    return f"{BLOCKS} blocks"


CHECKS: dict[str, Callable[[CudaDriver], Awaitable[str]]] = {
    "every copy path, real bytes": copies,
    "an engine's stream waits for layers": events,
    "calls of a lease wait for an engine's stream": ordered_calls,
    "an engine's stream waits for loads": loads_under_a_stream,
    "cancelled copies": cancelled,
    "a cache with three tiers": cache,
    "sleep and wake": sleeping,
    "two ranks": ranks,
    "copies without an event loop": worker,
}


async def run_checks(driver: CudaDriver, names: Sequence[str] = ()) -> dict[str, tuple[bool, str]]:
    """Run checks: whether each was right, and its result or its error."""
    found = {}
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        try:
            with anyio.fail_after(LIMIT):
                found[name] = (True, await check(driver))
        except Exception as error:
            found[name] = (False, f"{type(error).__name__}: {error}")
    return found


def model_folder(folder: Path) -> Path:
    """A small model for engines."""
    from tests.interop.engines.tiny_llama import write_model

    return write_model(folder)
