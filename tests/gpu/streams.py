"""Checks of an engine's CUDA streams with real bytes: calls that wait for a stream, and a stream that
waits for loads. A stream is held by a host function until the check lets it go."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import kvactors
from kvactors import NotReady, Step
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import NON_BLOCKING, NOT_READY, UNTIMED, CudaDriver
from kvactors.layout import make_layout
from kvactors.settings import Config
from tests.gpu.common import LIMIT, ensure, settings

HELD = 0.02
"""Seconds in which a call that does not wait would have returned."""
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PATTERN = 0x5A


def wait(event: threading.Event) -> None:
    """Wait for an event, on the driver's thread."""
    event.wait(LIMIT)


class Engine:
    """A cache on a GPU, two streams of an engine, and pinned memory for one block each.

    Attributes:
        device: the device blocks.
        cache: the cache.
        streams: the driver's handles.
    """

    def __init__(self, driver: CudaDriver, device: CudaDevice, cache: kvactors.KVCache) -> None:
        self.device, self.cache = device, cache
        self.streams: list[int] = []
        self._driver = driver
        self._pinned: list[int] = []
        self._block_bytes = int(device.piece_bytes.sum())

    def open(self) -> None:
        """Make the streams and the memory, with the context current."""
        for _ in range(2):
            self.streams.append(self._driver.read("cuStreamCreate", NON_BLOCKING))
            self._pinned.append(self._driver.read("cuMemHostAlloc", self._block_bytes, 3))

    def close(self) -> None:
        """Release them, with the context current."""
        for stream in self.streams:
            self._driver.call("cuStreamSynchronize", stream)
            self._driver.call("cuStreamDestroy", stream)
        for place in self._pinned:
            self._driver.call("cuMemFreeHost", place)

    @contextmanager
    def held(self, *streams: int) -> Iterator[threading.Event]:
        """Keep streams from going on until the event is set, or the block has ended."""
        go_on = threading.Event()
        function = HOST_FUNCTION(lambda _: wait(go_on))
        launch = self._driver._library.cuLaunchHostFunc
        try:
            with self.device.current():
                for stream in streams:
                    code = launch(ctypes.c_void_p(stream), function, None)
                    ensure(code == 0, f"cuLaunchHostFunc: {code}")
            yield go_on
        finally:
            go_on.set()
            with self.device.current():
                for stream in streams:  # the function must outlive its calls
                    self._driver.call("cuStreamSynchronize", stream)

    def copy(self, which: int, block: int, *, to_device: bool) -> None:
        """Put copies between a block and pinned memory on a stream."""
        place = self._pinned[which]
        with self.device.current():
            for region, size in zip(self.device.regions, self.device.piece_bytes, strict=True):
                there, nbytes = int(region + size * block), int(size)
                if to_device:
                    order = ("cuMemcpyHtoDAsync", there, place)
                else:
                    order = ("cuMemcpyDtoHAsync", place, there)
                self._driver.call(*order, nbytes, self.streams[which])
                place += nbytes

    def write(self, which: int, block: int) -> None:
        """Put a write of `PATTERN` to a block on a stream."""
        ctypes.memset(self._pinned[which], PATTERN, self._block_bytes)
        self.copy(which, block, to_device=True)

    def found(self, which: int) -> bytes:
        """The bytes that the copies on a stream have read, once they have ended."""
        with self.device.current():
            self._driver.call("cuStreamSynchronize", self.streams[which])
        return ctypes.string_at(self._pinned[which], self._block_bytes)

    def read(self, which: int, block: int) -> bytes:
        """The bytes of a block, behind all work of a stream."""
        self.copy(which, block, to_device=False)
        return self.found(which)

    async def are_held(self) -> list[bool]:
        """Whether each stream has not come to the end of its work after a while."""
        with self.device.current():
            events = [self._driver.read("cuEventCreate", UNTIMED) for _ in self.streams]
            for event, stream in zip(events, self.streams, strict=True):
                self._driver.call("cuEventRecord", event, stream)
        await asyncio.sleep(HELD)
        with self.device.current():
            held = [self._driver.status("cuEventQuery", event) == NOT_READY for event in events]
            for event in events:
                self._driver.call("cuEventDestroy", event)
        return held


@asynccontextmanager
async def engine(driver: CudaDriver, blocks: int) -> AsyncIterator[Engine]:
    """An engine while the block runs."""
    config = Config.from_mapping(settings(device={"num_blocks": blocks, "layerwise": True}))
    with ExitStack() as cleanup:
        device = CudaDevice.allocate(make_layout(config.layout, 16), blocks, driver=driver)
        cleanup.callback(device.close)
        async with kvactors.open(config, device=device) as cache:
            made = Engine(driver, device, cache)
            try:
                with device.current():
                    made.open()
                yield made
            finally:
                with device.current():
                    made.close()


def call_of(name: str, made: Engine, lease: kvactors.Lease, stream: int) -> Awaitable[Any]:
    """A call that takes a stream."""
    if name == "step":
        return made.cache.step([Step(lease, (), 80)], stream=stream)
    if name == "fork":
        return lease.fork(stream=stream)
    return getattr(lease, name)(80, stream=stream)  # type: ignore[no-any-return]


async def ordered_calls(driver: CudaDriver) -> str:
    """A call with a stream takes effect behind the work of the stream, and of no other."""
    names = ("commit", "step", "finish", "preempt", "fork")
    async with engine(driver, 12) as made:
        for seed, name in enumerate(names):
            tokens = [seed] * 85
            lease = await made.cache.acquire(name, tokens)
            await lease.wait_ready()
            last = lease.block_table[5]
            with made.held(made.streams[0]) as go_on:
                made.write(0, last)
                call = call_of(name, made, lease, made.streams[0])
                task = asyncio.ensure_future(call)
                await asyncio.sleep(HELD)
                ensure(not task.done(), f"{name} has not waited for the stream")
                ensure(made.cache.lookup(tokens).device == 0, f"{name} shared blocks too early")
                if name == "commit":
                    count = await lease.commit(16, stream=made.streams[1])
                    ensure(count == 1, "the commit waited for another stream")
                go_on.set()
                result = await task
            if name == "fork":
                copied = made.read(1, result.block_table[5])
                ensure(copied == bytes([PATTERN]) * len(copied), "the fork has other bytes")
                await result.finish()
            else:
                ensure(made.cache.lookup(tokens).device == 5, f"{name} has not shared the blocks")
            if name not in ("finish", "preempt"):
                await lease.finish()
            await made.cache.wait_idle()
        ensure(made.cache.check() == [], f"the cache is inconsistent: {made.cache.check()}")
    return ", ".join(names)


async def displaced(made: Engine) -> None:
    """Compute a prompt, and a second one that displaces it."""
    for seed in (1, 2):
        async with await made.cache.acquire("r", [seed] * 81) as lease:
            await lease.wait_ready()
            made.device.fill(lease.block_table[:5], lease.hashes(0, 5))
            await lease.commit(80)
        await made.cache.wait_idle()


async def loads_under_a_stream(driver: CudaDriver) -> str:
    """Streams wait for the copies of a load in place of the caller, find its bytes, and nothing is
    shared before the load has succeeded."""
    async with engine(driver, 7) as made:  # one block is free for a fork
        await displaced(made)
        copies = made.cache.system.plane.engine._copies  # type: ignore[attr-defined]
        with made.held(copies.lanes[True].stream) as go_on:
            lease = await made.cache.acquire("again", [1] * 81)
            ensure(lease.pending, "nothing is loaded")
            block = lease.block_table[4]
            before = made.read(0, block)
            await lease.wait_ready(stream=made.streams[0], deadline=LIMIT)
            await lease.wait_layer(1, stream=made.streams[1], deadline=LIMIT)
            ensure(lease.pending, "the load has ended while its stream was held")
            for which in (0, 1):
                made.copy(which, block, to_device=False)
            waits = zip(("wait_ready", "wait_layer"), await made.are_held(), strict=True)
            for name, waits_for_copies in waits:
                ensure(waits_for_copies, f"{name}: the stream has not waited for the copies")
            await refused(lease)
            go_on.set()
        found = [made.found(which) for which in (0, 1)]
        await made.cache.wait_idle()
        await refused(lease)  # the load has ended, and the caller has not seen how
        await lease.wait_ready()
        ensure(lease.cached_tokens == 80, f"{lease.cached_tokens} tokens were loaded")
        wrong = made.device.check(lease.block_table[:5], lease.hashes(0, 5))
        ensure(not wrong, f"blocks {wrong} have other bytes")
        after = made.read(0, block)
        ensure(before != after, "the block had its bytes before the load")
        ensure(found == [after, after], "a stream has found other bytes")
        await lease.finish(80)
        ensure(made.cache.check() == [], f"the cache is inconsistent: {made.cache.check()}")
    return "wait_ready, wait_layer"


async def refused(lease: kvactors.Lease) -> None:
    """Wrong unless calls that would share blocks raise NotReady."""
    calls: Sequence[Callable[[], Awaitable[Any]]] = (
        lambda: lease.commit(80),
        lambda: lease.fork(),
        lambda: lease.finish(80),
    )
    for call in calls:
        try:
            made = await call()
        except NotReady:
            continue
        if isinstance(made, kvactors.Lease):
            made.abandon()
        ensure(False, "blocks are shared before the result of the load is known")
