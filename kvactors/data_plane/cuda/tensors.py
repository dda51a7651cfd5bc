"""Tensors of a GPU as rows of bytes, without a layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvactors.data_plane.cuda.context import CudaContext, verify_memory
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.device.tensors import Rows
from kvactors.errors import DeviceError


class CudaTensors(CudaContext):
    """Tensors of one GPU, whose rows are the pieces of its blocks.

    Args:
        rows: the tensors, each with a row for every block.
        driver: the GPU's.

    Attributes:
        num_blocks: rows of each tensor.
        regions, piece_bytes, strides, offsets: see `GpuPieces`.

    Raises:
        DeviceError: the tensors are on several GPUs, or a tensor is not memory of the GPU that it
            names.
        CudaError: a call of the driver failed.
    """

    def __init__(self, rows: Sequence[Rows], driver: CudaDriver) -> None:
        ordinals = sorted({one.ordinal or 0 for one in rows})
        if len(ordinals) > 1:
            raise DeviceError(f"tensors of several GPUs: {ordinals}. A worker copies those of one")
        super().__init__(ordinals[0], driver)
        try:
            with self.current():
                for i, one in enumerate(rows):
                    what = f"tensor {i}, of {one.rows} rows of {one.nbytes} bytes,"
                    size = (one.rows - 1) * one.stride + one.nbytes
                    verify_memory(driver, one.address, size, self.ordinal, what)
        except BaseException:
            self.close()
            raise
        self.num_blocks = rows[0].rows
        self.regions = np.array([one.address for one in rows], np.int64)
        self.piece_bytes = np.array([one.nbytes for one in rows], np.int64)
        self.strides = np.array([one.stride for one in rows], np.int64)
        self.offsets = np.cumsum(self.piece_bytes) - self.piece_bytes
