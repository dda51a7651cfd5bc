"""Writes to device blocks of a simulated cache that no lease holds."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Any

from kvactors.actor import ActorRef, Envelope
from kvactors.actor.clock import now
from kvactors.actor.instrument import Instrument, Turn
from kvactors.prefix_index.messages import Acquire
from kvactors.system import System


class HeldBlocks(Instrument):
    """Compares the bytes of each device block from the end of the lease that held it until the next
    request gets it: a forward pass that goes on after the end of its lease has changed them.

    Args:
        system: of the cache.
        on_acquire: called with the task of each request.

    Attributes:
        problems: each changed block as text.
        requests: the requests that held the changed blocks.
    """

    def __init__(self, system: System, on_acquire: Callable[[asyncio.Task[Any]], None]) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._system = system
        self._on_acquire = on_acquire
        self._last: dict[int, tuple[str, float]] = {}  # by block: its last request, and the end
        self._device: Any = None
        self._unheld: dict[int, bytes] = {}
        system.supervisor.instruments.add(self)

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        """See `Instrument`."""
        task = asyncio.current_task()
        if isinstance(envelope.message, Acquire) and task is not None:
            self._on_acquire(task)

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """See `Instrument`."""
        if receiver is self._system.index:
            self._look()

    def check(self) -> None:
        """Compare every block that no lease holds."""
        self._compare(list(self._unheld))

    def _look(self) -> None:
        """A turn of PrefixIndex has ended."""
        device, index = self._system.plane.device, self._system.index_actor
        if device is not self._device:  # after a sleep it has other memory
            self._device, self._unheld = device, {}
        if getattr(device, "regions", None) is None or device.kind != "host":
            return
        held = dict.fromkeys(index.index.loading, "")
        for copy in index.core.forks._copies.values():
            held.update(dict.fromkeys(copy.targets, ""))
        for lease in index.core.leases:
            held.update(dict.fromkeys(lease.path.table(), lease.request_id))
        self._compare([block for block in held if block in self._unheld])
        for block, name in held.items():
            self._unheld.pop(block, None)
            if name:
                self._last[block] = name, now()
        for block in range(device.num_blocks):
            if block not in held and block not in self._unheld:
                self._unheld[block] = self._bytes(block)

    def _compare(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._bytes(block) == self._unheld[block]:
                continue
            self._unheld[block] = self._bytes(block)
            name, ended = self._last.get(block, ("", 0.0))
            holder = f"that of {name!r} had it until {ended:.4f}" if name else "none had it before"
            self.problems.append(
                f"device block {block} was written while no lease held it ({holder}): end a lease "
                "after the pass that writes its blocks, or record the pass"
            )
            if name:
                self.requests.append(name)

    def _bytes(self, block: int) -> bytes:
        pieces = zip(self._device.regions.tolist(), self._device.piece_bytes.tolist(), strict=True)
        return b"".join(ctypes.string_at(start + block * size, size) for start, size in pieces)
