"""Copies of a GPU beside a matrix product that keeps its multiprocessors busy."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.driver import quietly
from kvactors.data_plane.cuda.engine import CudaCopyEngine
from kvactors.threads import in_thread
from tests.benchmarks.frame import Row, rate_row, time_row

KERNEL = Path(__file__).with_name("product.ptx")
GRID, THREADS = 1024, 256


class Product:
    """A matrix product on its own stream. Made and closed with the GPU's context current.

    Args:
        executor: of the GPU.
        size: rows and columns of the matrices.
        undo: receives the clean-up of each resource.
    """

    def __init__(self, executor: CudaCopyEngine, size: int, undo: ExitStack) -> None:
        self._device = executor.device
        driver = self._driver = executor.device.driver
        module = driver.read("cuModuleLoadData", KERNEL.read_bytes())
        undo.callback(quietly, driver, "cuModuleUnload", module)
        self._kernel = driver.read("cuModuleGetFunction", module, b"kvactors_product")
        matrices = []
        for _ in range(3):
            matrices.append(driver.read("cuMemAlloc", 4 * size * size))
            undo.callback(quietly, driver, "cuMemFree", matrices[-1])
        self._stream = driver.read("cuStreamCreate", 1)
        undo.callback(quietly, driver, "cuStreamDestroy", self._stream)
        self._event = driver.read("cuEventCreate", 2)
        undo.callback(quietly, driver, "cuEventDestroy", self._event)
        undo.callback(driver.status, "cuStreamSynchronize", self._stream)
        self._values = (ctypes.c_int64 * 4)(*matrices, size)
        at = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * 4)(*(at + 8 * i for i in range(4)))

    async def seconds(self, count: int) -> float:
        """Seconds of one product, of so many one after another."""
        driver, began = self._driver, time.perf_counter()
        with self._device.current():
            for _ in range(count):
                driver.call(
                    "cuLaunchKernel",
                    self._kernel,
                    GRID,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    self._stream,
                    self._pointers,
                    None,
                )
            driver.call("cuEventRecord", self._event, self._stream)
        await in_thread(self._wait, "kvactors-product")
        return (time.perf_counter() - began) / count

    def _wait(self) -> None:
        with self._device.current():
            self._driver.call("cuEventSynchronize", self._event)


@contextmanager
def product_of(executor: CudaCopyEngine, size: int) -> Iterator[Product]:
    """A product while the block runs."""
    undo = ExitStack()
    try:
        with executor.device.current():
            product = Product(executor, size, undo)
        yield product
    finally:
        with executor.device.current():
            undo.close()


async def product_rows(name: str, executor: CudaCopyEngine, *, quick: bool) -> list[Row]:
    """Copies and product alone, and at the same time, in each direction.

    Args:
        name: of the layout.
        executor: open.
        quick: small matrices, for tests.
    """
    size, count, rounds = (16, 2, 2) if quick else (2048, 20, 5)
    blocks = executor.device.num_blocks
    ids, slots = list(range(blocks - 1, -1, -1)), list(range(blocks))
    nbytes = blocks * executor.device.layout.block_bytes
    rows = []
    with product_of(executor, size) as product:
        await product.seconds(1)
        for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
            copies: dict[bool, list[float]] = {True: [], False: []}
            products: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(rounds):
                copies[False].append(await _copy(executor, direction, ids, slots))
                products[False].append(await product.seconds(count))
                running = asyncio.ensure_future(product.seconds(count))
                await asyncio.sleep(0)
                while not running.done():
                    copies[True].append(await _copy(executor, direction, ids, slots))
                products[True].append(await running)
            case = f"GPU, {name}: {direction.value}"
            rows.append(
                rate_row(
                    f"{case}, beside a matrix product",
                    nbytes / median(copies[True]) / 1e9,
                    nbytes / median(copies[False]) / 1e9,
                    "GB/s",
                    "the same copies alone, same run",
                )
            )
            rows.append(
                time_row(
                    f"{case}, the product beside it",
                    1000 * median(products[True]),
                    1000 * median(products[False]),
                    "ms",
                    "the same product alone, same run",
                )
            )
    return rows


async def _copy(
    executor: CudaCopyEngine, direction: Direction, ids: list[int], slots: list[int]
) -> float:
    began = time.perf_counter()
    if await executor.run(direction, ids, slots):
        raise RuntimeError(f"copies {direction.value} failed: {executor.trouble}")
    return time.perf_counter() - began
