"""Copies by streams, on the stand-in driver."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda import copies as cuda_copies
from kvactors.data_plane.cuda import engine as cuda_executor
from kvactors.data_plane.cuda.copies import BATCH_FROM
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import ABANDONED, CudaDriver, CudaError
from kvactors.data_plane.cuda.engine import CudaCopyEngine
from kvactors.data_plane.local import LocalPlane
from kvactors.device.arena import Arena
from kvactors.layout import DSALayout, GQALayout, MLALayout
from tests.support import cuda
from tests.support.cuda_stand import SMALL, made, standing, until

TO_HOST, TO_DEVICE = Direction.TO_HOST, Direction.TO_DEVICE
LAYOUTS = {
    "1000 bytes": GQALayout(3, 1, 8, 125, "uint8"),
    "1 KiB": SMALL,
    "1090 bytes": GQALayout(2, 1, 10, 109, "uint8"),
    "fp8": GQALayout(3, 4, 64, 16, quantization="block_wise_fp8"),
    "bfloat16 16 KiB": GQALayout(2, 4, 128, 16, "bfloat16"),
    "mla": MLALayout(3, 64),
    "dsa": DSALayout(3, 64),
    "varied": GQALayout(2, [1, 4, 2], [64, 10, 7], 16, extra_layers=1, extra_block_ratio=2.0),
    "64 KiB": GQALayout(2, 8, 128, 32, "float16"),
    "2 MiB": GQALayout(1, 8, 128, 1024, "float16"),
}


# -- bytes


WAYS = {  # the driver's version, the size from which on copy engines are used, what is counted
    "kernel": (13000, 1 << 40, {"launches"}),
    "batch": (13000, 0, {"batches"}),
    "old batch": (12080, 0, {"batches"}),
    "singles": (12040, 0, {"singles"}),
    "default": (13000, None, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
async def test_every_byte_survives_the_copy_to_the_host_and_back(fake, name, way):
    """In place and shuffled, with every way to copy."""
    version, batch_from, counted = WAYS[way]
    fake.set("version", version)
    layout = LAYOUTS[name]
    async with standing(fake, layout, batch_from=batch_from) as stand:
        rng = np.random.default_rng(7)
        for shuffled in (False, True):
            ids = rng.permutation(8)[:5].tolist() if shuffled else [2, 3, 4, 5, 6]
            slots = rng.permutation(8)[:5].tolist() if shuffled else [1, 2, 3, 4, 5]
            before = bytes(stand.arena._map)
            stand.device.fill(ids, stand.name(ids))
            assert await stand.executor.run(TO_HOST, ids, slots) == ()
            after = bytes(stand.arena._map)
            for slot in set(range(8)) - set(slots):
                rows = slice(slot * stand.arena.stride, (slot + 1) * stand.arena.stride)
                assert before[rows] == after[rows], "slots of others are left alone"
            others = list(reversed(range(8)))[:5]
            stand.device.fill(range(8), bytes(32 * 8))
            assert await stand.executor.run(TO_DEVICE, others, slots) == ()
            assert stand.device.check(others, stand.name(ids)) == []
            rest = sorted(set(range(8)) - set(others))
            assert stand.device.check(rest, bytes(32 * 3)) == [], "blocks of others are left alone"
            assert bytes(stand.arena._map) == after
        found = stand.executor.statistics()
        kinds = ("launches", "batches", "singles")
        if counted is not None:
            assert {kind for kind in kinds if getattr(found, kind)} == counted
        assert (found.bytes_to_host, found.bytes_to_device) == (
            10 * layout.block_bytes,
            10 * layout.block_bytes,
        )
        assert (found.errors, found.broken) == (0, None)


async def test_pieces_of_a_block_may_go_by_different_ways(fake):
    async with standing(fake, LAYOUTS["fp8"], batch_from=2048) as stand:
        await stand.there_and_back(range(8), range(8))
        found = stand.executor.statistics()
        assert found.launches > 0
        assert found.batches > 0
        before = fake.calls("pageable")
        await stand.executor.run(TO_HOST, range(8), range(8))
        await stand.executor.run(TO_DEVICE, range(8), range(8))
        assert fake.calls("pageable") == before, "our copies are of pinned memory only"


async def test_an_operation_takes_several_batched_calls(fake, monkeypatch):
    monkeypatch.setattr(cuda_copies, "BATCH", 5)
    async with standing(fake, batch_from=0) as stand:
        await stand.there_and_back(range(8), range(8))
        assert stand.executor.statistics().batches == 2 * -(-8 * 6 // 5)


async def test_more_pairs_than_fit_into_the_first_scratch_memory(fake):
    layout = GQALayout(1, 1, 4, 1, "uint8")
    async with standing(fake, layout, blocks=3000, slots=3000, batch_from=1 << 40) as stand:
        ids = np.random.default_rng(1).permutation(3000).tolist()
        await stand.there_and_back(ids, range(3000))


async def test_many_operations_at_once_in_both_directions(fake):
    async with standing(fake, blocks=64, slots=64, batch_from=1 << 40) as stand:
        stand.device.fill(range(64), stand.names)
        fake.set("delay_us", 300)
        await stand.executor.run(TO_HOST, range(32), range(32))
        down = [stand.executor.run(TO_HOST, [32 + i], [32 + i]) for i in range(16)]
        up = [stand.executor.run(TO_DEVICE, [48 + i], [i]) for i in range(16)]
        assert set(await asyncio.gather(*down, *up)) == {()}
        assert stand.device.check(range(48, 64), stand.names[: 32 * 16]) == []
        await stand.executor.run(TO_DEVICE, range(16), range(32, 48))
        assert stand.device.check(range(16), stand.names[32 * 32 : 32 * 48]) == []
        assert await stand.executor.run(TO_HOST, [], []) == ()


# -- layers


async def test_progress_reports_layers_in_order_as_they_arrive(fake, monkeypatch):
    monkeypatch.setattr(cuda_executor, "GROUP", 1)
    layout = GQALayout(4, 1, 8, 16, "float16")
    async with standing(fake, layout, batch_from=0) as stand:
        stand.device.fill(range(8), stand.names)
        await stand.executor.run(TO_HOST, range(8), range(8))
        stand.device.fill(range(8), bytes(32 * 8))
        fake.gate(0)
        seen = []
        running = asyncio.ensure_future(
            stand.executor.run(TO_DEVICE, range(8), range(8), seen.append)
        )
        for layers in range(1, 4):
            fake.gate(1)
            await until(lambda layers=layers: seen[-1:] == [layers])
            assert not running.done()
        fake.gate(-1)
        assert await running == ()
        assert seen == [1, 2, 3, 4]
        assert stand.wrong(range(8)) == []
        await stand.executor.run(TO_HOST, range(8), range(8), seen.append)
        assert seen == [1, 2, 3, 4], "stores do not go by layers"


async def test_a_progress_that_raises_stops_nothing(fake):
    async with standing(fake) as stand:
        assert await stand.executor.run(TO_DEVICE, [1], [1], lambda layers: 1 // 0) == ()


async def test_an_engines_stream_waits_for_a_layer(fake, monkeypatch):
    monkeypatch.setattr(cuda_executor, "GROUP", 1)
    layout = GQALayout(3, 1, 8, 16, "float16", layer_offset=5)
    async with standing(fake, layout, batch_from=0) as stand:
        device, driver, executor = stand.device, stand.device.driver, stand.executor
        with device.current():
            engine, event = driver.read("cuStreamCreate", 1), driver.read("cuEventCreate", 2)
        assert not executor.make_stream_wait(engine, [1], 0)
        fake.gate(0)
        running = asyncio.ensure_future(executor.run(TO_DEVICE, [1], [1]))
        await until(lambda: executor.make_stream_wait(engine, [1], 1))
        with device.current():
            driver.call("cuEventRecord", event, engine)
            assert driver.status("cuEventQuery", event) == 600
            fake.gate(1)
            await asyncio.sleep(0.01)
            assert driver.status("cuEventQuery", event) == 600, "the second layer is not there"
            fake.gate(1)
            await until(lambda: driver.status("cuEventQuery", event) == 0)
        assert not running.done()
        fake.gate(-1)
        assert await running == ()
        with device.current():
            driver.call("cuEventDestroy", event)
            driver.call("cuStreamDestroy", engine)


# -- faults


@pytest.mark.parametrize(("blocks", "slots"), [([8], [0]), ([0], [8]), ([-1], [0]), ([0, 1], [0])])
async def test_ids_out_of_range_fail_alone(fake, blocks, slots):
    async with standing(fake) as stand:
        assert await stand.executor.run(TO_HOST, blocks, slots) == tuple(range(len(blocks)))
        assert stand.executor.statistics().errors == 1
        assert await stand.executor.run(TO_HOST, [0], [0]) == (), "the next is none the worse"


async def test_a_tensor_that_moved_fails_the_copy(fake):
    layout = SMALL
    owner = CudaDevice.allocate(layout, 4, driver=CudaDriver(fake.path))
    tensors = [cuda.PointerTensor(m.address, m.shape, "float16") for m in owner.tensors]
    device, arena = CudaDevice(layout, tensors, driver=owner.driver), Arena(4, layout.block_bytes)
    executor = CudaCopyEngine(device, arena)
    await executor.open()
    assert await executor.run(TO_HOST, [0], [0]) == ()
    tensors[2].address += 16
    assert await executor.run(TO_HOST, [0], [0]) == (0,)
    await executor.close()
    for one in (device, owner, arena):
        one.close()


async def test_before_open_and_after_close_everything_fails(fake):
    stand = made(fake, SMALL)
    assert await stand.executor.run(TO_HOST, [0, 1], [0, 1]) == (0, 1)
    await stand.executor.close()
    await stand.executor.open()
    await stand.executor.open()
    await stand.executor.close()
    await stand.executor.close()
    assert await stand.executor.run(TO_HOST, [0, 1], [0, 1]) == (0, 1)
    assert fake.live("pinned") == 0
    stand.close()


STARTING = [
    "cuCtxPushCurrent",
    "cuMemHostRegister",
    "cuMemHostGetDevicePointer",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuMemHostAlloc",
    "cuMemAlloc",
    "cuStreamCreate",
    "cuMemcpyHtoDAsync",
    "cuStreamSynchronize",
]


@pytest.mark.parametrize("call", STARTING)
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_every_call_at_start_may_fail(fake, call, nth):
    """An error with the call's name that leaves nothing behind, or no error where the call is made
    less often."""
    stand = made(fake, SMALL)
    fake.reset()
    before = {what: fake.live(what) for what in cuda.EVERYTHING}
    fake.fail(call, 2, nth)
    caught = None
    try:
        await stand.executor.open()
    except CudaError as error:
        caught = error
    if caught is not None:
        assert (caught.function, caught.name) == (call, "CUDA_ERROR_OUT_OF_MEMORY")
        assert {what: fake.live(what) for what in cuda.EVERYTHING} == before
    else:
        assert fake.calls(call) < nth
    fake.fail(call, 0, 0)
    await stand.executor.open()
    assert await stand.executor.run(TO_HOST, [1], [1]) == ()
    await stand.executor.close()
    stand.close()


RUNNING = [
    "cuCtxPushCurrent",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyBatchAsync",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamSynchronize",
    "cuMemHostAlloc",
    "cuMemAlloc",
]


@pytest.mark.parametrize("call", RUNNING)
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("way", ["kernel", "batch", "singles"])
@pytest.mark.parametrize("code", [2, 719])
async def test_every_call_of_a_copy_may_fail(fake, monkeypatch, call, nth, way, code):
    """Pairs reported as arrived have arrived, no copy goes on, the failure is reported, and later
    operations fail at once."""
    monkeypatch.setattr(cuda_executor, "GROUP", 1)
    version, batch_from, _ = WAYS[way]
    fake.set("version", version)
    async with standing(fake, batch_from=batch_from) as stand:
        executor, told = stand.executor, []
        executor.broke = told.append
        stand.device.fill(range(8), stand.names)
        assert await executor.run(TO_HOST, range(4), range(4)) == ()
        stand.device.fill(range(4), bytes(32 * 4))
        fake.set("delay_us", 200)
        fake.fail(call, code, nth)
        results = await asyncio.gather(
            executor.run(TO_DEVICE, range(4), range(4)),
            executor.run(TO_HOST, [4], [4]),
            executor.run(TO_DEVICE, [7], [0]),
        )
        assert fake.live("running") == 0
        fake.fail(call, 0, 0)
        fake.set("delay_us", 0)
        if results[0] == ():
            assert stand.wrong(range(4)) == []
        if results[2] == ():
            assert stand.device.check([7], stand.name([0])) == []
        if any(results):
            # an operation that begins after the failure is refused, not counted
            assert 1 <= executor.statistics().errors <= sum(map(bool, results))
            assert call in executor.statistics().broken
            assert told[0] is (code == 719)
            assert await executor.run(TO_HOST, [1], [1]) == (0,)
        else:
            assert told == []
            assert await executor.run(TO_HOST, [1], [1]) == ()


async def test_a_batch_refused_in_the_middle_runs_out_before_the_pairs_are_given_back(fake):
    async with standing(fake, batch_from=0) as stand:
        fake.gate(0)
        fake.fail("cuMemcpyBatchAsync", 1)
        running = asyncio.ensure_future(stand.executor.run(TO_HOST, range(8), range(8)))
        await until(lambda: stand.executor.trouble)
        await asyncio.sleep(0.01)
        assert not running.done(), "the half that was begun still runs"
        fake.gate(-1)
        assert await running == tuple(range(8))


async def test_a_context_that_breaks_fails_everything_and_hangs_nothing(fake):
    async with standing(fake) as stand:
        told = []
        plane = LocalPlane(stand.device, stand.arena, lambda _: stand.executor, store_timeout=1.0)
        fake.gate(0)
        running = [
            asyncio.ensure_future(stand.executor.run(way, [i], [i]))
            for i, way in enumerate((TO_HOST, TO_DEVICE))
        ]
        await until(lambda: fake.live("running") > 0)
        fake.sticky(700)
        assert [await one for one in running] == [(0,), (0,)]
        plane.on_status(lambda *status: told.append(status))
        plane.acknowledge_loss()
        plane.on_status(lambda *status: told.append(status))
        assert told == [(False, True, 0), (False, False, 0)]
        assert await stand.executor.run(TO_HOST, [0], [0]) == (0,)
        assert "ILLEGAL_ADDRESS" in stand.executor.statistics().broken
        fake.gate(-1)
        fake.sticky(0)  # otherwise the leak check would prove nothing


@pytest.mark.parametrize(("gate", "batch_from"), [(0, 0), (1, 1 << 40)])
async def test_a_cancelled_run_returns_when_nothing_runs(fake, gate, batch_from):
    async with standing(fake, batch_from=batch_from) as stand:
        stand.device.fill(range(8), stand.names)
        fake.gate(gate)
        running = asyncio.ensure_future(stand.executor.run(TO_HOST, range(8), range(8)))
        await until(lambda: fake.live("running") > 0)
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0.005)
            assert not running.done()
        fake.gate(-1)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert fake.live("running") == 0
        assert await stand.executor.run(TO_DEVICE, range(8), range(8)) == ()
        assert stand.wrong(range(8)) == []


async def test_nothing_is_asked_while_nothing_runs(fake):
    async with standing(fake) as stand:
        await stand.executor.run(TO_HOST, [0], [0])
        asked = fake.calls("cuEventQuery")
        await asyncio.sleep(0.02)
        assert fake.calls("cuEventQuery") == asked
        assert not stand.executor._timer


async def test_a_copy_that_never_ends_keeps_its_memory(fake):
    """After a release the operation is over. Closing keeps memory that a copy may still use."""
    stand = made(fake, SMALL, limit=0.05)
    await stand.executor.open()
    stand.device.fill(range(8), stand.names)
    fake.gate(0)
    running = asyncio.ensure_future(stand.executor.run(TO_HOST, range(8), range(8)))
    await until(lambda: fake.live("running") > 0)
    stand.executor.abandon_pending()
    assert await running == tuple(range(8))
    await stand.executor.close()
    pinned = fake.live("pinned")
    stand.close()
    assert fake.live("pinned") == pinned > 0
    assert fake.live("device") > 0
    fake.gate(-1)  # the copies run now, into memory that is still there
    await until(lambda: not stand.executor._in_flight)
    kept, _arena, _view, device = ABANDONED.pop()
    with device.current():
        kept.close()
        for memory in device.tensors:
            device.driver.call("cuMemFree", memory.address)
        device.driver.call("cuStreamDestroy", device._stream)
    device.driver.call("cuDevicePrimaryCtxRelease", 0)
    with cuda.context_again(device.driver):
        device.driver.status("cuMemHostUnregister", stand.arena.address)


async def test_closing_waits_for_copies_in_flight(fake):
    stand = made(fake, SMALL)
    await stand.executor.open()
    stand.device.fill(range(8), stand.names)
    fake.set("delay_us", 5000)
    running = asyncio.ensure_future(stand.executor.run(TO_HOST, range(8), range(8)))
    await until(lambda: fake.live("running") > 0)
    await stand.executor.close()
    assert await running == ()
    stand.close()


# -- ways


LACKING = {
    **{f"no kernels, {code}": {"cuModuleLoadData": code} for code in (209, 218, 222, 801)},
    "no batches": {"cuMemcpyBatchAsync": 801},
    "neither": {"cuModuleLoadData": 801, "cuMemcpyBatchAsync": 801},
}


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
async def test_a_driver_without_kernels_or_batches_copies_without(fake, lacking):
    for call, code in lacking.items():
        fake.fail(call, code, -1)
    async with standing(fake, LAYOUTS["64 KiB"]) as stand:
        await stand.there_and_back(range(8), range(8))
        found = stand.executor.statistics()
        assert found.has_kernel is ("cuModuleLoadData" not in lacking)
        assert found.has_batch is ("cuMemcpyBatchAsync" not in lacking)
        assert found.batch_from == (BATCH_FROM if found.has_kernel else 0)
        assert (found.launches, bool(found.batches)) == (0, found.has_batch)
        assert bool(found.singles) is not found.has_batch


async def test_a_copy_within_the_gpu_arrives_or_breaks_the_engine(fake):
    stand = made(fake, SMALL)
    await stand.executor.open()
    stand.device.fill([0, 1], stand.names[:64])
    assert await stand.executor.run(Direction.WITHIN, (0, 1), (5, 4)) == ()
    assert stand.device.check([5, 4], stand.names[:64]) == []
    assert await stand.executor.run(Direction.WITHIN, (0,), (99,)) == (0,)
    assert stand.executor.trouble == ""
    fake.fail("cuMemcpyDtoDAsync", 2)
    assert await stand.executor.run(Direction.WITHIN, (0, 1), (5, 4)) == (0, 1)
    assert "cuMemcpyDtoDAsync" in stand.executor.trouble
    await stand.executor.close()
    assert await stand.executor.run(Direction.WITHIN, (0,), (5,)) == (0,)
    stand.device.close()
    stand.arena.close()
