"""FastDeploy's signals: small arrays of int32 in shared memory, which several processes map."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvactors.errors import DeadlineExceeded, LayoutError, StoreError
from kvactors.tier_cache import shared_memory

FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory of POSIX

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2
"""Values of `prefix_tree_status`."""

POLL = 0.05
"""Seconds between two looks at a signal of another process."""


class SharedSignal:
    """An array of int32 under the name that FastDeploy's `IPCSignal` gives it.

    Args:
        name: of the signal.
        suffix: of the engine, its port.
        size: numbers.
        create: make it, in place of one of that name that an earlier process has left. Otherwise
            another process has made it.

    Attributes:
        value: the numbers.

    Raises:
        StoreError: there is no such signal, or it cannot be made.
    """

    def __init__(self, name: str, suffix: str | int, size: int, *, create: bool) -> None:
        self.name = f"{name}.{suffix}"
        self._path = FOLDER / self.name
        if create:
            self._path.unlink(missing_ok=True)
        try:
            self._memory = shared_memory(self._path, 4 * size, create=create)
        except (OSError, LayoutError) as error:
            raise StoreError(f"signal {self.name!r} in {FOLDER}: {error}") from error
        self.value: NDArray[np.int32] = np.frombuffer(self._memory, np.int32, size)
        self._created = create

    def wait_for(self, total: int, limit: float, sleep: Callable[[float], None]) -> None:
        """Wait until the numbers add up to `total`.

        Raises:
            DeadlineExceeded: they do not within `limit` seconds.
        """
        until = time.monotonic() + limit
        while (found := int(self.value.sum())) != total:
            if time.monotonic() >= until:
                raise DeadlineExceeded(
                    f"signal {self.name!r} is {self.value.tolist()} after {limit} s: {found} of "
                    f"{total} ranks are ready"
                )
            sleep(POLL)

    def close(self) -> None:
        """Remove the signal if this process has made it, any number of times."""
        if self._created:
            self._path.unlink(missing_ok=True)
        self._created = False
