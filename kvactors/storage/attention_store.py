"""AttentionStore as storage, through its SDK: match, read and write with device pointers and block
ids."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.attention_sdk import MARGIN, Sdk, SdkSettings
from kvactors.device.base import Device
from kvactors.errors import LayoutError, SdkError
from kvactors.storage.attempts import Attempts
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.messages import Outcome

log = get_logger()

SLICE_BLOCKS, SLICE_TIMEOUT_S = 100, 10.0


class AttentionStoreBackend(DeviceStore):
    """The device's regions are handed to the SDK as they are: a pointer a layer for keys and, if
    the layout has them, for values. LayoutError for a layout with anything else in it (scales, an
    indexer, layers that differ)."""

    def __init__(self, settings: SdkSettings, device: Device) -> None:
        super().__init__(device.layout.block_bytes)
        pieces = device.layout.pieces
        roles = list(dict.fromkeys(piece.role for piece in pieces))
        if roles not in (["key"], ["key", "value"]):
            raise LayoutError(
                f"AttentionStore takes keys and values, and this layout has {', '.join(roles)}"
            )
        layers = {piece.layer for piece in pieces}
        is_uneven = len(pieces) != len(roles) * len(layers)  # a layer lacks values
        if is_uneven or len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
            raise LayoutError(
                "AttentionStore takes layers of one shape, and those of this layout differ"
            )
        if settings.latent and not settings.cuda:
            raise LayoutError(
                "AttentionStore needs pointers to values, which this layout does not have (MLA): "
                "only the longer argument list names another kind of "
                "attention (attention_store.platform = 'cuda')"
            )
        self.settings = settings
        self.sdk = Sdk(settings, "storage")
        self.ready_timeout = settings.store.ready_timeout_s + MARGIN
        pointers = [int(address) for address in device.regions]
        self.regions = pointers[:: len(roles)], pointers[1::2] if len(roles) == 2 else []

    async def open(self) -> None:
        try:
            await self.sdk.open()
        except BaseException:
            self.sdk.close()
            raise

    async def fetch(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """See `DeviceStore.fetch`: the matching blocks are read, from the first missing block on
        nothing."""
        if self.attempts.reads.paused:
            return self._unavailable(len(blocks))
        ids, deadline = np.frombuffer(tokens, "<u4"), now() + seconds
        found = await self._call(
            self.attempts.lookups, len(blocks), self.sdk.match(ids, start, seconds)
        )
        if found is None:
            return 0
        found = min(found, len(blocks))
        self.misses += len(blocks) - found
        if not found or now() >= deadline:
            return 0
        path = ids[: (start + found) * self.sdk.block_size]
        got = await self._call(
            self.attempts.reads,
            found,
            self.sdk.read(path, start, self.regions, blocks[:found], deadline - now()),
        )
        self.reads += got or 0
        return got or 0

    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """See `DeviceStore.save`: writes the blocks that the store lacks, in slices, up to the
        first that is short, or until the time is over."""
        if self.attempts.writes.paused:
            return self._unavailable(len(blocks))
        ids, store = np.frombuffer(tokens, "<u4"), self.settings.store
        total = min(seconds, store.write_total_timeout_s or seconds)
        slice_blocks = store.write_slice_blocks or SLICE_BLOCKS
        deadline = now() + total
        # From block 0: whether a match counts from its start or from the root is not documented.
        found = await self._call(self.attempts.lookups, len(blocks), self.sdk.match(ids, 0, total))
        if found is None:
            return 0
        written = stored = min(max(0, found - start), len(blocks))
        for first in range(stored, len(blocks), slice_blocks):
            some = blocks[first : first + slice_blocks]
            left = deadline - now()
            if left <= 0:
                break
            path = ids[: (start + first + len(some)) * self.sdk.block_size]
            seconds = min(left, store.write_slice_timeout_s or SLICE_TIMEOUT_S)
            got = await self._call(
                self.attempts.writes,
                len(some),
                self.sdk.write(path, start + first, self.regions, some, seconds),
            )
            written += got or 0
            if got != len(some):
                break
        self.writes += written - stored
        return written

    async def _call(
        self, attempts: Attempts, blocks: int, call: Coroutine[Any, Any, int]
    ) -> int | None:
        """Await a call, unless its kind pauses. None if it fails or is not made."""
        if not attempts.allow():
            call.close()
            self._unavailable(blocks)
            return None
        try:
            got = await call
        except SdkError as error:
            log.warning(
                "AttentionStore call failed", call=attempts.kind, blocks=blocks, error=str(error)
            )
            self._unavailable(blocks)
            attempts.failed(str(error))
            return None
        if got or attempts is self.attempts.lookups:
            attempts.worked()
        else:
            full = attempts is self.attempts.writes
            attempts.failed("no block was moved", Outcome.NO_SPACE if full else Outcome.CORRUPT)
        return got

    async def close(self) -> None:
        self.sdk.close()
