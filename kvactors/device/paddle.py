"""Paddle tensors as a device.

The module guards Paddle calls that kill the process instead of raising. It also restores the signal
handlers that Paddle's import takes over.
"""

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
    """Import Paddle.

    The import takes over the handlers of SIGTERM and of fatal signals. This function restores them,
    so that a clean shutdown stays possible.

    Returns:
        The module `paddle`.

    Raises:
        DeviceError: Paddle is not installed. The text names the extra to install.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns of unused build tools
            import paddle
    except ImportError as error:
        raise DeviceError(
            "a paddle device needs Paddle: pip install 'kvactors[paddle]' (CPU) or "
            "'kvactors[paddle-gpu]'"
        ) from error
    paddle.disable_signal_handler()
    return paddle


def gpus() -> int:
    """Number of GPUs that Paddle can use.

    Callers check this before they use `paddle.device.cuda`. Without a GPU most of its functions
    raise, and some of them end the process.
    """
    paddle = import_paddle()
    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def allocator(place: str = "cpu") -> Callable[[tuple[int, ...], str], Any]:
    """Return a function that makes zeroed tensors without autograd at a place.

    Args:
        place: `cpu`, `gpu:0` and so on.

    Raises:
        DeviceError: Paddle has no such place.
    """
    paddle = import_paddle()
    kind, _, number = place.partition(":")
    if kind == "cpu":
        target = paddle.CPUPlace()
    elif kind == "gpu" and (number or "0").isdigit() and int(number or 0) < gpus():
        target = paddle.CUDAPlace(int(number or 0))
    else:
        raise DeviceError(f"Paddle has no place {place!r}, only cpu and {gpus()} GPUs")

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        tensor = paddle.zeros(shape, dtype=dtype)
        if str(tensor.place) != str(target):
            tensor = tensor._copy_to(target, True)
        tensor.stop_gradient = True
        return tensor

    return make


class PaddleDevice(TensorDevice):
    """Device blocks in Paddle tensors, which the engine owns and the device does not move.

    See `TensorDevice` for the parameters.
    """

    @classmethod
    def allocate(cls, layout: Layout, num_blocks: int, place: str = "cpu") -> PaddleDevice:
        """A device of new tensors.

        Args:
            layout: of the blocks.
            num_blocks: number of blocks.
            place: see `allocator`.

        Raises:
            LayoutError: Paddle tensors cannot hold the layout's dtypes, or `num_blocks` is below 1.
            DeviceError: Paddle is not installed, or has no such place.
        """
        tensors: Sequence[Any] = layout.allocate(allocator(place), num_blocks)
        return cls(layout, tensors)
