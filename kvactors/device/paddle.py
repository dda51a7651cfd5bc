"""Paddle tensors as a device, of Paddle 2.6 and later.

The module guards Paddle calls that kill the process instead of raising. It also restores the signal
handlers that Paddle's import takes over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from kvactors.device.tensors import TensorDevice
from kvactors.errors import DeviceError
from kvactors.layout.base import Layout

OLDEST = (2, 6)  # the first version whose tensors have `data_ptr`, `strides` and `element_size`

PACKAGES = ("paddlepaddle-gpu", "paddlepaddle")

GPU_NEEDS = (
    "paddlepaddle-gpu 2.6.2 is the last GPU build on PyPI, for Python up to 3.12, and needs the "
    "CUDA and cuDNN libraries that it was built for on the machine. GPU builds of Paddle 3 come "
    "from Paddle's own package index (see Paddle's installation page)"
)


@cache
def import_paddle() -> Any:
    """Import Paddle.

    The import takes over the handlers of SIGTERM and of fatal signals. This function restores them,
    so that a clean shutdown stays possible.

    Raises:
        DeviceError: Paddle cannot be imported or is too old. The text says what is needed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns of unused build tools
            import paddle
    except Exception as error:
        found = installed()
        if not found:
            raise DeviceError(
                "a paddle device needs Paddle: pip install '/path/to/kvactors[paddle]' (CPU) or "
                f"'/path/to/kvactors[paddle-gpu]'. {GPU_NEEDS}"
            ) from error
        needs = f". {GPU_NEEDS}" if "gpu" in found else ""
        raise DeviceError(f"{found} cannot be imported: {error}{needs}") from error
    version = str(getattr(paddle, "__version__", "0.0.0"))
    if _numbers(version) < OLDEST and _numbers(version) != (0, 0):  # 0.0.0: built from source
        raise DeviceError(f"Paddle {version} is too old: a paddle device needs 2.6 or later")
    paddle.disable_signal_handler()
    return paddle


def installed() -> str:
    """The Paddle package that is installed, with its version. Empty if there is none."""
    for name in PACKAGES:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def gpus() -> int:
    """Number of GPUs that Paddle can use.

    Callers check this before they use `paddle.device.cuda`. Without a GPU most of its functions
    raise, and some of them end the process.
    """
    paddle = import_paddle()
    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def allocator(place: str = "cpu") -> Callable[[tuple[int, ...], str], Any]:
    """Return a function that makes zeroed tensors without autograd at a place.

    Raises:
        DeviceError: Paddle has no such place. The function raises it if there is not enough memory.
    """
    paddle = import_paddle()
    kind, _, number = place.partition(":")
    if kind == "cpu":
        target = paddle.CPUPlace()
    elif kind == "gpu" and (number or "0").isdigit() and int(number or 0) < gpus():
        target = paddle.CUDAPlace(int(number or 0))
    else:
        why = ""
        if kind == "gpu" and not paddle.is_compiled_with_cuda():
            why = f". Paddle {paddle.__version__} here is a CPU build. {GPU_NEEDS}"
        elif kind == "gpu" and not gpus():
            why = (
                f". Paddle {paddle.__version__} is a build for CUDA {paddle.version.cuda()}, and "
                "finds no GPU that its driver can use"
            )
        raise DeviceError(f"Paddle has no place {place!r}, only cpu and {gpus()} GPUs{why}")

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        try:
            tensor = paddle.zeros(shape, dtype=dtype)
            if str(tensor.place) != str(target):
                tensor = tensor._copy_to(target, True)
        except MemoryError as error:
            reason = str(error).strip().splitlines()[0]
            raise DeviceError(
                f"memory at {place} for a tensor of {list(shape)}: {reason}"
            ) from error
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

        Raises:
            LayoutError: Paddle tensors cannot hold the layout's dtypes, or `num_blocks` is below 1.
            DeviceError: Paddle is not installed, has no such place, or not enough memory there.
        """
        tensors: Sequence[Any] = layout.allocate(allocator(place), num_blocks)
        return cls(layout, tensors)
