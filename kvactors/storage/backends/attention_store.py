"""AttentionStore as storage, through its SDK: match, read and write with device pointers and block
ids."""

from __future__ import annotations

import numpy as np

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.attention_store import MARGIN, Sdk
from kvactors.device.base import Device
from kvactors.errors import LayoutError, SdkError
from kvactors.sdk_settings import SdkSettings
from kvactors.storage.backends.device_store import DeviceStore

log = get_logger()


class AttentionStoreBackend(DeviceStore):
    """The device's regions are handed to the SDK as they are: a pointer a layer for keys and, if
    the layout has them, for values. LayoutError for a layout with anything else in it (scales, an
    indexer)."""

    def __init__(self, settings: SdkSettings, device: Device) -> None:
        super().__init__(device.layout.block_bytes)
        roles = [role.name for role in device.layout.roles]
        if roles not in (["key"], ["key", "value"]):
            raise LayoutError(
                f"AttentionStore takes keys and values, and this layout has {', '.join(roles)}"
            )
        if settings.latent and not settings.cuda:
            raise LayoutError(
                "AttentionStore needs pointers to values, which this layout does not have (MLA): "
                "only the longer argument list names another kind of "
                "attention (attention_store.platform = 'cuda')"
            )
        self.settings = settings
        self.sdk = Sdk(settings, "storage")
        self.ready_timeout = settings.ready_timeout + MARGIN
        pointers = [int(address) for address in device.regions]
        self.keys, self.values = pointers[:: len(roles)], pointers[1::2] if len(roles) == 2 else []

    async def open(self) -> None:
        """Connect, and wait until the other side is ready."""
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
        if not self.breaker.closed():
            return 0
        ids, deadline = np.frombuffer(tokens, "<u4"), now() + seconds
        try:
            found = min(await self.sdk.match(ids, start, seconds), len(blocks))
            self.misses += len(blocks) - found
            if not found or now() >= deadline:
                return self._saw(0)
            path = ids[: (start + found) * self.sdk.block_size]
            got = await self.sdk.read(
                path, start, self.keys, self.values, blocks[:found], deadline - now()
            )
        except SdkError as error:
            return self._failed(len(blocks), "read", error)
        self.reads += got
        return self._saw(got)

    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """See `DeviceStore.save`: writes the blocks that the store lacks, in slices, up to the
        first that is short, or until the time is over."""
        if not self.breaker.closed():
            return 0
        ids, settings = np.frombuffer(tokens, "<u4"), self.settings
        total = min(seconds, settings.write_total_timeout or seconds)
        deadline = now() + total
        try:
            # From block 0: whether a match counts from its start or from the root is not
            # documented.
            stored = min(max(0, await self.sdk.match(ids, 0, total) - start), len(blocks))
        except SdkError as error:
            return self._failed(len(blocks), "match", error)
        written = self._saw(stored)
        for first in range(stored, len(blocks), settings.write_slice_blocks):
            some = blocks[first : first + settings.write_slice_blocks]
            left = deadline - now()
            if left <= 0 or not self.breaker.closed():
                break
            path = ids[: (start + first + len(some)) * self.sdk.block_size]
            try:
                got = await self.sdk.write(
                    path,
                    start + first,
                    self.keys,
                    self.values,
                    some,
                    min(left, settings.write_slice_timeout),
                )
            except SdkError as error:
                self._failed(len(some), "write", error)
                break
            self._saw(got)
            written += got
            if got < len(some):
                break
        self.writes += written - stored
        return written

    def _saw(self, good: int) -> int:
        self.breaker.saw(good=True)
        return good

    def _failed(self, blocks: int, call: str, error: SdkError) -> int:
        log.warning("AttentionStore call failed", call=call, blocks=blocks, error=str(error))
        self.unavailable += blocks
        self.breaker.saw(good=False)
        return 0

    async def close(self) -> None:
        """See `DeviceStore.close`."""
        self.sdk.close()
