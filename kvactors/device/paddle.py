"""Paddle's tensors as a device. Calls that are known to kill the process instead of raising are
guarded, and Paddle's import does not keep the process's signals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from kvactors.device.tensors import TensorDevice
from kvactors.errors import DeviceError
from kvactors.layout.base import Layout


@cache
def import_paddle() -> Any:
    """The module. Its import takes over the handlers of SIGTERM and of fatal signals; here they are
    given back, so that a clean shutdown stays possible. DeviceError names the extra if it is not
    installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of build tools that nobody here needs
            import paddle
    except ImportError as error:
        raise DeviceError(
            "a paddle device needs Paddle: pip install 'kvactors[paddle]' (CPU) or "
            "'kvactors[paddle-gpu]'"
        ) from error
    paddle.disable_signal_handler()
    return paddle


def gpus() -> int:
    """How many GPUs Paddle can use. Without one, most of `paddle.device.cuda` raises, and some of
    it ends the process: ask this first."""
    paddle = import_paddle()
    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def allocator(place: str = "cpu") -> Callable[[tuple[int, ...], str], Any]:
    """Makes zeroed tensors at a place (cpu, gpu:0, ..) that take no part in autograd. DeviceError
    if there is no such place."""
    paddle = import_paddle()
    kind, _, number = place.partition(":")
    if kind == "cpu":
        target = paddle.CPUPlace()
    elif kind == "gpu" and (number or "0").isdigit() and int(number or 0) < gpus():
        target = paddle.CUDAPlace(int(number or 0))
    else:
        raise DeviceError(f"Paddle has no place {place!r}; there are cpu and {gpus()} GPUs")

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        tensor = paddle.zeros(shape, dtype=dtype)
        if str(tensor.place) != str(target):
            tensor = tensor._copy_to(target, True)
        tensor.stop_gradient = True
        return tensor

    return make


class PaddleDevice(TensorDevice):
    """tensors: Paddle's, in the layout's contract order or by (layer, role); they are the engine's
    own, and stay where they are."""

    @classmethod
    def allocate(cls, layout: Layout, num_blocks: int, place: str = "cpu") -> PaddleDevice:
        """A device of new tensors. LayoutError, DeviceError."""
        tensors: Sequence[Any] = layout.allocate(allocator(place), num_blocks)
        return cls(layout, tensors)
