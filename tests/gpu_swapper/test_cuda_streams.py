"""Leases whose device work is on CUDA streams of the engine, on the stand-in driver."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

import kvactors
from kvactors import Step
from kvactors.data_plane.cuda import engine as cuda_engine
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.errors import DeadlineExceeded, DeviceError, NotReady
from kvactors.layout import GQALayout
from kvactors.settings import Config
from tests.support import cuda
from tests.support.cache import opened as opened_on_host
from tests.support.cache import prompt
from tests.support.cuda_stand import until

ENDS = {"cancelled": asyncio.CancelledError, "late": DeadlineExceeded, "refused": DeviceError}
HELD = 0.02
"""Seconds in which a call that does not wait would have returned."""


class Stand:
    """A cache on a GPU with two streams of an engine."""

    def __init__(self, fake, cache, device, streams):
        self.fake, self.cache, self.device = fake, cache, device
        self.driver = device.driver
        self.stream, self.other = streams
        self.library = ctypes.CDLL(fake.path)
        self.loop = asyncio.get_running_loop()
        self.kept = []

    def work(self, stream, call=lambda: None):
        """Have a stream call a function when its turn comes, as a kernel. It counts as one for the
        gate."""
        function = cuda.HOST_FUNCTION(lambda _: call())
        self.kept.append(function)
        with self.device.current():
            assert self.library.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None) == 0

    async def stored(self, seed):
        """Compute a prompt of five blocks and share it."""
        async with await self.cache.acquire("r", [seed] * 81) as lease:
            await lease.wait_ready()
            self.device.fill(lease.block_table[:5], lease.hashes(0, 5))
            await lease.commit(80)
        await self.cache.wait_idle()

    async def hits(self, seed):
        lease = await self.cache.acquire("probe", [seed] * 81)
        await lease.finish()
        return lease.hits.device

    def bytes_of(self, blocks):
        """Of every piece, as the memory is now."""
        pieces = zip(self.device.regions, self.device.piece_bytes, strict=True)
        return [
            ctypes.string_at(int(region + size * block), int(size))
            for region, size in pieces
            for block in blocks
        ]

    def write(self, block, byte):
        """Fill a block with one byte, as a kernel does."""
        for region, size in zip(self.device.regions, self.device.piece_bytes, strict=True):
            ctypes.memset(int(region + size * block), byte, int(size))

    @property
    def events(self):
        return self.cache.system.plane.engine._events


@asynccontextmanager
async def standing(fake, *, blocks=6, layerwise=True, kernel=False):
    layout = GQALayout(3, 2, 32, 16, "bfloat16")
    device = CudaDevice.allocate(layout, blocks, driver=CudaDriver(fake.path))
    settings = {
        "cache": {"block_size": 16, "default_deadline_s": 60.0},
        "device": {"num_blocks": blocks, "layerwise": layerwise},
        "host": {"slots": 16, "dma_min_bytes": 1 << 40 if kernel else 0},
        "layout": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32, "dtype": "bfloat16"},
    }
    try:
        async with kvactors.open(Config.from_mapping(settings), device=device) as cache:
            with device.current():
                streams = [device.driver.read("cuStreamCreate", 1) for _ in range(2)]
            try:
                yield Stand(fake, cache, device, streams)
            finally:
                fake.gate(-1)
                with device.current():
                    for stream in streams:
                        device.driver.call("cuStreamSynchronize", stream)
                        device.driver.call("cuStreamDestroy", stream)
    finally:
        device.close()


async def test_the_blocks_of_a_lease_are_free_when_its_stream_has_come_so_far(fake):
    async with standing(fake) as stand:
        for end in ("finish", "preempt", "abandon", "record_pass"):
            lease = await stand.cache.acquire("a", [1] * 81)
            free = stand.cache.free_blocks()
            fake.gate(0)
            stand.work(stand.stream)
            if end == "abandon":
                lease.abandon(stream=stand.stream)
                task = asyncio.ensure_future(stand.cache.wait_idle())
            elif end == "record_pass":
                stand.cache.record_pass([lease], stream=stand.stream)
                task = asyncio.ensure_future(lease.finish())
            else:
                task = asyncio.ensure_future(getattr(lease, end)(stream=stand.stream))
            await asyncio.sleep(HELD)
            assert not task.done()
            assert stand.cache.free_blocks() == free
            with pytest.raises(kvactors.NoRoom):
                await stand.cache.acquire("b", [2] * 81)
            fake.gate(-1)
            await task
            await (await stand.cache.acquire("b", [2] * 81)).finish()


@pytest.mark.parametrize("what", ["fork", "step"])
@pytest.mark.parametrize("how", ["cancelled", "late", "refused"])
async def test_a_fork_or_step_that_ends_before_its_event_changes_nothing(fake, what, how):
    async with standing(fake, blocks=12) as stand:
        lease = await stand.cache.acquire("a", [1] * 85)
        free = stand.cache.free_blocks()

        def call(**more):
            if what == "fork":
                return lease.fork(stream=stand.stream, **more)
            return stand.cache.step([Step(lease, [1], 80)], stream=stand.stream, **more)

        fake.gate(0)
        stand.work(stand.stream)
        if how == "refused":
            fake.fail("cuEventRecord", 1)
        task = asyncio.ensure_future(call(**({"deadline": 0.01} if how == "late" else {})))
        await asyncio.sleep(0.005)
        if how == "cancelled":
            task.cancel()
        with pytest.raises(ENDS[how]):
            await task
        assert stand.cache.free_blocks() == free
        assert lease.num_tokens == 85
        assert not lease._handle.committing
        assert await stand.hits(1) == 0
        fake.gate(-1)
        made = await call()
        if what == "fork":
            await made.finish()
        else:
            assert made[0].committed_blocks == 5
        await lease.finish()
        assert stand.cache.check() == []


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_call_that_ends_before_its_event_changes_nothing(fake, how):
    """Its event is not recorded again before it was reached, and not destroyed."""
    async with standing(fake, blocks=12) as stand:
        lease = await stand.cache.acquire("a", [1] * 81)
        fake.gate(0)
        stand.work(stand.stream)
        for _ in range(3):
            call = lease.commit(
                80, stream=stand.stream, deadline=None if how == "cancelled" else 0.01
            )
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.005)
            if how == "cancelled":
                task.cancel()
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlineExceeded):
                await task
        assert len(stand.events._made) == 3, "none was recorded again"
        assert await lease.commit(80, stream=stand.other) == 5, "the event is another stream's"
        fake.gate(-1)
        with stand.device.current():
            stand.driver.call("cuStreamSynchronize", stand.stream)
        for _ in range(5):
            assert await lease.commit(80, stream=stand.stream) == 5
        assert len(stand.events._made) == 4, "they are recorded again when they were reached"
        await lease.finish()
        assert stand.cache.check() == []


async def test_no_event_is_used_after_the_copy_engine_has_closed(fake):
    async with standing(fake) as stand:
        event = stand.events.record(stand.stream)
    for call in (event.query, lambda: stand.events.record(stand.stream)):
        with pytest.raises(DeviceError, match="closed"):
            call()


@pytest.mark.parametrize("function", ["cuEventCreate", "cuEventRecord"])
async def test_a_driver_that_refuses_an_event_commits_nothing(fake, function):
    async with standing(fake, blocks=12) as stand:
        lease = await stand.cache.acquire("a", [1] * 81)
        fake.fail(function, 1)
        with pytest.raises(DeviceError, match=function):
            await lease.commit(80, stream=stand.stream)
        with pytest.raises(DeviceError, match="cuEventRecord"):
            await lease.commit(80, stream=12345)
        with pytest.raises(ValueError, match="event and stream"):
            await lease.commit(80, stream=stand.stream, event=asyncio.Event())
        with pytest.raises(ValueError, match="computed_tokens"):
            await lease.commit(82, stream=stand.stream)
        assert await stand.hits(1) == 0
        assert await lease.commit(80, stream=stand.stream) == 5
        await lease.finish()


@pytest.mark.parametrize("kernel", [False, True])
async def test_a_stream_waits_for_all_layers_in_place_of_the_caller(fake, monkeypatch, kernel):
    """The call returns while the copies are held, and the stream's work comes after all of them."""
    monkeypatch.setattr(cuda_engine, "GROUP", 1)
    async with standing(fake, kernel=kernel) as stand:
        for seed in (1, 2):
            await stand.stored(seed)
        lease = await stand.cache.acquire("again", [1] * 81)
        assert lease.pending
        fake.gate(0)
        await lease.wait_ready(stream=stand.stream, deadline=5.0)
        assert lease.pending
        assert lease.cached_tokens == 80
        found = []
        stand.work(stand.stream, lambda: found.append(stand.bytes_of(lease.block_table[:5])))
        fake.gate(1)
        await asyncio.sleep(HELD)
        assert found == [], "the stream has not waited for the last layer"
        for call in (lease.commit(80), lease.finish(80), lease.preempt(80), lease.fork()):
            with pytest.raises(NotReady):
                await call
        fake.set("delay_us", 5000)  # work that does not wait overtakes the last layers
        fake.gate(-1)
        await lease.wait_ready()
        assert await lease.commit(80, stream=stand.stream) == 5
        assert found == [stand.bytes_of(lease.block_table[:5])]
        assert stand.device.check(lease.block_table[:5], lease.hashes(0, 5)) == []
        await lease.finish()
        assert stand.cache.check() == []


@pytest.mark.parametrize(
    ("form", "kernel"), [("handle", False), ("object", False), ("object", True)]
)
async def test_a_stream_waits_for_one_layer_of_each_copy(fake, monkeypatch, form, kernel):
    """Each layer is a copy, or a copy and a kernel. The stream goes on after its layer, without the
    loop."""
    monkeypatch.setattr(cuda_engine, "GROUP", 1)
    async with standing(fake, kernel=kernel) as stand:
        found = stand.cache.statistics().copies
        assert found.batch_from == (1 << 40 if kernel else 0), "the setting of [host]"
        for seed in (1, 2):
            await stand.stored(seed)
        lease = await stand.cache.acquire("again", [1] * 81)
        assert lease.pending
        fake.gate(0)
        streams, blocks = stand.cache.system.plane.streams, lease.block_table[:5]
        assert not streams.make_stream_wait(stand.stream, blocks, 0), "not begun"
        await until(lambda: streams.make_stream_wait(stand.stream, blocks, 0))
        assert not streams.make_stream_wait(stand.stream, [*blocks, lease.block_table[5]], 0)
        given = stand.stream if form == "handle" else SimpleNamespace(cuda_stream=stand.stream)
        assert await lease.wait_layer(1, stream=given) == 80
        event = streams.record_event(stand.stream)
        fake.gate(1)
        await asyncio.sleep(HELD)
        assert not event.query(), "the second layer is not there"
        fake.gate(-1)
        await until(event.query)
        await lease.wait_ready()
        assert stand.device.check(blocks, lease.hashes(0, 5)) == []
        assert await lease.wait_layer(2, stream=given) == 80, "all is there"
        await lease.finish()
        assert stand.cache.check() == []


@pytest.mark.parametrize("by", ["stream", "caller"])
async def test_a_layers_wait_needs_the_result_of_the_load_as_well(fake, by):
    """The load has ended, but the caller has not read its result."""
    async with standing(fake, blocks=7) as stand:  # one is free for a fork
        for seed in (1, 2):
            await stand.stored(seed)
        lease = await stand.cache.acquire("again", [1] * 81)
        assert lease.pending
        if by == "stream":
            fake.gate(0)
            await lease.wait_ready(stream=stand.other)  # all copies are on their stream
            lease._handle.unread = False
            await lease.wait_layer(0, stream=stand.stream, deadline=5.0)
            fake.gate(-1)
        else:
            await lease.wait_layer(0)
        await stand.cache.wait_idle()
        for call in (lease.commit(80), lease.fork(), lease.preempt(80), lease.finish(80)):
            with pytest.raises(NotReady):
                await call
        (outcome,) = await stand.cache.step([Step(lease, [1], 80)])
        assert isinstance(outcome.error, NotReady)
        await lease.wait_ready()
        assert await lease.commit(80) == 5
        await lease.finish()
        assert stand.cache.check() == []


async def test_a_stream_waits_for_copies_that_begin_after_the_call(fake):
    async with standing(fake) as stand:
        for seed in (1, 2):
            await stand.stored(seed)
        engine = stand.cache.system.plane.engine
        put, begun = engine._put, asyncio.Event()
        let = threading.Event()
        loop = asyncio.get_running_loop()

        def later(copies, op):
            if op.transfer.to_device:
                loop.call_soon_threadsafe(begun.set)
                assert let.wait(20)
            put(copies, op)

        engine._put = later
        lease = await stand.cache.acquire("again", [1] * 81)
        fake.gate(0)
        ready = asyncio.ensure_future(lease.wait_ready(stream=stand.stream))
        await begun.wait()
        await asyncio.sleep(HELD)
        assert not ready.done(), "no copy is on its stream"
        let.set()
        await ready
        assert lease.pending
        done = []
        stand.work(stand.stream, lambda: done.append(1))
        await asyncio.sleep(HELD)
        assert done == []
        fake.gate(-1)
        await lease.wait_ready()
        await until(lambda: done)
        await lease.finish()
        assert not stand.cache.system.plane.engine._waits


async def test_a_cancelled_wait_of_a_stream_leaves_the_loads_alone(fake):
    async with standing(fake) as stand:
        for seed in (1, 2):
            await stand.stored(seed)
        engine = stand.cache.system.plane.engine
        lease = await stand.cache.acquire("again", [1] * 81)
        fake.gate(0)
        for passes in range(4):
            ready = asyncio.ensure_future(lease.wait_ready(stream=stand.stream))
            for _ in range(passes):
                await asyncio.sleep(0)
            ready.cancel()
            with suppress(asyncio.CancelledError):
                await ready
            await asyncio.sleep(0)
            assert not engine._waits
        fake.gate(-1)
        await lease.wait_ready()
        assert lease.cached_tokens == 80
        await lease.finish(80)


async def test_a_load_that_fails_under_a_waiting_stream_is_no_hit(fake):
    """The engine's work has found other bytes: nothing of it can be shared before the engine has
    seen the result."""
    async with standing(fake) as stand:
        for seed in (1, 2):
            await stand.stored(seed)
        lease = await stand.cache.acquire("again", [1] * 81)
        fake.gate(0)
        await lease.wait_ready(stream=stand.stream)
        fake.sticky(700)
        with suppress(Exception):
            await asyncio.sleep(HELD)
        with pytest.raises(NotReady):
            await lease.commit(80)
        with suppress(kvactors.KVActorsError):
            await lease.wait_ready()
            assert lease.cached_tokens == 0
        lease.abandon()
        fake.sticky(0)
        fake.gate(-1)


async def test_host_memory_has_no_streams():
    async with opened_on_host(device=16) as cache:
        lease = await cache.acquire("a", prompt(1, 2))
        for call in (
            lambda: lease.commit(8, stream=7),
            lambda: lease.finish(8, stream=7),
            lambda: lease.preempt(8, stream=7),
            lambda: lease.fork(stream=7),
            lambda: lease.fork_many(2, stream=7),
            lambda: cache.step([Step(lease, [1], 8)], stream=7),
            lambda: lease.wait_ready(stream=7),
            lambda: lease.wait_layer(0, stream=7),
        ):
            with pytest.raises(DeviceError, match="streams are out of reach"):
                await call()
        await lease.finish(8)
