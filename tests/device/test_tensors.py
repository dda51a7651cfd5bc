"""Devices of given tensors: numpy's, Paddle's, or another framework's with DLPack."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvactors.device import TensorDevice
from kvactors.device.arena import Arena
from kvactors.device.paddle import PaddleDevice, allocator, gpus, import_paddle
from kvactors.device.tensors import address_of, region_of
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout import GQALayout

pytestmark = pytest.mark.full

LAYOUT = GQALayout(2, 2, 32, 16, "float16")


class Stranger:
    """A tensor of an unknown framework: it has DLPack's interface and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        return self.array.__dlpack__()


def numpy_tensors(layout, blocks, wrap=lambda array: array):
    """bfloat16 is not numpy's: such layouts are left out by the callers."""
    return [
        wrap(np.zeros(shape, dtype)) for shape, dtype in layout.allocate(lambda *made: made, blocks)
    ]


@pytest.mark.parametrize("wrap", [lambda array: array, Stranger])
def test_any_tensor_with_dlpack_is_accepted(wrap):
    layout = LAYOUT
    arrays = numpy_tensors(layout, 4)
    device = TensorDevice(layout, [wrap(array) for array in arrays])
    device.fill([1], b"n" * 32)
    assert any(array[1].any() for array in arrays)
    assert not any(array[0].any() for array in arrays)
    device.ensure_in_place()


def test_the_copied_bytes_are_those_that_paddle_computed():
    paddle = import_paddle()
    layout = GQALayout(1, 1, 4, 2, "float32")
    device, arena = PaddleDevice.allocate(layout, 3), Arena(1, layout.block_bytes)
    key, value = device.tensors
    key[2] = paddle.arange(8, dtype="float32").reshape([1, 2, 4])
    value[2] = 7.0
    device.copy_to_host([2], arena, [0])
    copied = np.frombuffer(bytes(arena.view(0)), np.float32)
    assert copied.tolist() == [*range(8), *[7.0] * 8]
    device.copy_to_device([0], arena, [0])
    assert key[0].numpy().ravel().tolist() == [*range(8)]
    arena.close()


def test_tensors_may_be_given_by_layer_and_role():
    layout = LAYOUT
    tensors = numpy_tensors(layout, 4)
    by_name = {(p.layer, p.role): t for p, t in zip(layout.pieces, tensors, strict=True)}
    shuffled = dict(sorted(by_name.items(), key=lambda item: item[0][1], reverse=True))
    assert (
        TensorDevice(layout, shuffled).regions.tolist()
        == TensorDevice(layout, tensors).regions.tolist()
    )
    del shuffled[1, "value"]
    with pytest.raises(LayoutError, match=r"lacking: \[\(1, 'value'\)\]"):
        TensorDevice(layout, shuffled)


@pytest.mark.parametrize(
    ("spoil", "error", "complaint"),
    [
        (lambda t: t[:-1], LayoutError, "4 regions, and 3 were given"),
        (
            lambda t: [t[0], t[1].astype(np.float32), *t[2:]],
            LayoutError,
            "layer 0, value, is float32",
        ),
        (lambda t: [*t[:3], t[3][:-1]], LayoutError, "layer 1, value"),
        (
            lambda t: [*t[:3], np.zeros((*t[3].shape[:-1], 64), np.float16)[..., ::2]],
            DeviceError,
            "not contiguous",
        ),
        (lambda t: [*t[:3], t[3].astype(np.float64)], DeviceError, "DLPack type 2, 64 bits"),
        (lambda t: [*t[:3], "a tensor"], DeviceError, "str is no tensor"),
        (lambda t: [array[:0] for array in t], LayoutError, "at least 1 block"),
    ],
)
def test_tensors_that_do_not_fit_are_named(spoil, error, complaint):
    layout = LAYOUT
    with pytest.raises(error, match=complaint):
        TensorDevice(layout, spoil(numpy_tensors(layout, 4)))


def test_a_tensor_that_moved_is_an_error_and_no_copy():
    layout = GQALayout(1, 1, 4, 2, "float32")
    device, arena = PaddleDevice.allocate(layout, 3), Arena(1, layout.block_bytes)
    other = import_paddle().zeros([64, 64])
    device.tensors[1] = other
    with pytest.raises(DeviceError, match="layer 0, value, has moved"):
        device.copy_to_host([0], arena, [0])
    assert not any(arena.view(0))
    arena.close()


def test_addresses_by_the_framework_and_by_dlpack_agree():
    paddle = import_paddle()
    for tensor in (
        paddle.zeros([5, 3]),
        paddle.zeros([5, 3])[1:3],
        np.zeros((4, 4), np.float32)[2:],
        Stranger(np.zeros(3, np.float32)),
    ):
        assert address_of(tensor) == region_of(tensor).address


def test_eight_bit_floats_count_as_bytes():
    assert region_of(import_paddle().zeros([2, 4]).astype("float8_e4m3fn")).dtype == "uint8"


@pytest.mark.parametrize("place", ["gpu:0", "gpu", "gpu:x", "npu", "cpu0"])
def test_places_that_are_not_there(place):
    if place.startswith("gpu") and place != "gpu:x" and gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match=f"no place '{place}'"):
        allocator(place)


SCRIPT = """
import asyncio, os, signal
from kvactors.device.paddle import import_paddle
import_paddle()
async def main():
    asked = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set_result, None)
    print("ready", flush=True)
    await asked
    print("clean", flush=True)
asyncio.run(main())
"""


async def test_sigterm_still_ends_a_serving_loop_cleanly():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", SCRIPT, stdout=subprocess.PIPE, env=environ
    )
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    assert (out, process.returncode) == (b"clean\n", 0)
