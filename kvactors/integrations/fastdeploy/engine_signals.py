"""FastDeploy's signals: small arrays of int32 in shared memory, which the engine, its workers and
its cache manager map."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvactors.errors import DeadlineExceeded, LayoutError, StoreError
from kvactors.tier_cache import shared_memory

FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory of POSIX

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2
"""Values of `prefix_tree_status`."""

POLL_S = 0.05  # between two looks at a signal of another process


class SharedSignal:
    """An array of int32 under the name that FastDeploy's `IPCSignal` gives it. `create`: make it,
    in place of one that an earlier process has left. Otherwise another process has made it."""

    def __init__(self, name: str, suffix: str | int, size: int, *, create: bool) -> None:
        self.name = f"{name}.{suffix}"
        self.created = create
        self._path = FOLDER / self.name
        if create:
            self.clear()
        try:
            self._memory = shared_memory(self._path, 4 * size, create=create)
        except (OSError, LayoutError) as error:
            raise StoreError(f"signal {self.name!r} in {FOLDER}: {error}") from error
        self.value: NDArray[np.int32] = np.frombuffer(self._memory, np.int32, size)

    def wait_for(self, total: int, limit: float) -> None:
        until = time.monotonic() + limit
        while (found := int(self.value.sum())) != total:
            if time.monotonic() >= until:
                raise DeadlineExceeded(
                    f"signal {self.name!r} is {self.value.tolist()} after {limit} s: {found} of "
                    f"{total} ranks are ready"
                )
            time.sleep(POLL_S)

    def clear(self) -> None:
        """Remove the signal, any number of times. FastDeploy's engine does so at its exit."""
        self._path.unlink(missing_ok=True)


RANKS = 0  # a size: one number for each rank

SIGNALS = {
    "cache_ready_signal": ("cache_ready_signal", RANKS, False),
    "swap_space_ready_signal": ("swap_space_ready_signal", RANKS, False),
    "cache_transfer_inited_signal": ("cache_transfer_inited_signal", RANKS, False),
    "prefix_tree_status_signal": ("prefix_tree_status", 1, False),
    "shm_cache_task_flag_broadcast": ("cache_task_broadcast_signal", 1, True),
    "cache_task_is_paused_signal": ("cache_task_is_paused", 1, True),
    "cache_task_inflight_signal": ("cache_task_inflight", RANKS, True),
}
"""By the attribute of FastDeploy's manager: name, size, and whether the manager makes it. No task
crosses processes, so those that the manager makes stay 0."""


class EngineSignals:
    """Signals of one engine, `named` by the attribute of FastDeploy's manager."""

    def __init__(self, port: int | str, ranks: int) -> None:
        self.named: dict[str, SharedSignal] = {}
        try:
            for attribute, (name, size, create) in SIGNALS.items():
                self.named[attribute] = SharedSignal(name, port, size or ranks, create=create)
        except BaseException:
            self.close()
            raise

    def opened(self, *, swap_space: bool) -> None:
        if swap_space:
            self.named["swap_space_ready_signal"].value[:] = 1
        self.named["cache_transfer_inited_signal"].value[:] = 1

    @property
    def status(self) -> int:
        return int(self.named["prefix_tree_status_signal"].value[0])

    @status.setter
    def status(self, value: int) -> None:
        self.named["prefix_tree_status_signal"].value[0] = value

    def close(self) -> None:
        for one in self.named.values():
            if one.created:
                one.clear()
