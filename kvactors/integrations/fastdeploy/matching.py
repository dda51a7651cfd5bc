"""Matches a request with the device, host memory and storage, and brings its blocks to the
device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import KVActorsError, NoRoom
from kvactors.integrations.fastdeploy.device_cache import CallInFlight, DeviceCache
from kvactors.integrations.fastdeploy.requests import RequestRecord
from kvactors.types import Tier

log = get_logger()


class PrefixMatch:
    """The blocks of a request that need not be computed, in the order of its path.

    Attributes:
        gpu, cpu, storage: device blocks, by the tier that had their bytes.
    """

    def __init__(self) -> None:
        self.gpu: list[int] = []
        self.cpu: list[int] = []
        self.storage: list[int] = []
        self.cpu_seconds = self.storage_seconds = 0.0

    def metrics(self, block_size: int) -> dict[str, Any]:
        """The dictionary that FastDeploy's scheduler reads, and changes."""
        return {
            "gpu_match_token_num": len(self.gpu) * block_size,
            "cpu_match_token_num": len(self.cpu) * block_size,
            "storage_match_token_num": len(self.storage) * block_size,
            "match_gpu_block_ids": self.gpu,
            "gpu_recv_block_ids": self.cpu,
            "match_storage_block_ids": self.storage,
            "cpu_cache_prepare_time": self.cpu_seconds,
            "storage_cache_prepare_time": self.storage_seconds,
        }


class Matcher:
    """Finds the blocks of requests."""

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache

    def match(self, request: str, record: RequestRecord) -> PrefixMatch:
        """Let a request hold the leading blocks of its path that are cached. Loads have ended when
        this returns. `record.nodes` are the blocks.

        Raises:
            NoRoom: blocks in host memory do not fit on the device. Nothing is held.
            DeviceError: a copy does not end. Nothing is held, and the copy's blocks are lost.
        """
        cache, index = self._cache, self._cache.index
        index.tick()
        hashes = record.hashes(0, record.path.num_full_blocks)
        record.nodes = index.match(hashes)
        index.hold(record.nodes)
        found = PrefixMatch()
        found.gpu = [node.block for node in record.nodes]
        try:
            self._load(request, record, hashes, found)
            self._fetch(request, record, len(hashes), found)
        except BaseException:
            index.release(record.nodes)
            record.nodes = []
            raise
        finally:
            cache.report_moves()
        return found

    # -- host memory, and storage through it

    def _load(
        self, request: str, record: RequestRecord, hashes: Sequence[bytes], found: PrefixMatch
    ) -> None:
        if self._cache.lower is None:
            return
        host = self._cache.lower.host
        host.enter()
        try:
            while self._load_some(request, record, hashes[len(record.nodes) :], found):
                host.end()
        finally:
            host.end()

    def _load_some(
        self, request: str, record: RequestRecord, hashes: Sequence[bytes], found: PrefixMatch
    ) -> bool:
        """Load as many blocks as there are host slots. Returns whether there may be more."""
        cache, lower = self._cache, self._cache.lower
        if lower is None or not hashes:
            return False
        host = lower.host
        sources, seconds = host.find(hashes, found.storage_seconds, cache.interrupted)
        found.storage_seconds += seconds
        count = self._fitting(sources)
        if not count:
            return False
        keys, begun = hashes[:count], time.monotonic()
        slots = host.pin(keys)
        try:
            cache.make_room(count)
            blocks = cache.blocks.take(count, request)
        except BaseException:
            host.unpin(keys)
            raise
        try:
            loaded = host.load(keys, slots, blocks)
        except BaseException:
            cache.lose(blocks)
            raise
        if not loaded:
            cache.blocks.give(blocks, request)
            return False
        seconds = time.monotonic() - begun
        if Tier.STORAGE in sources[:count]:
            found.storage_seconds += seconds
        else:
            found.cpu_seconds += seconds
        self._hold(record, keys, blocks)
        for source, block in zip(sources, blocks, strict=False):
            (found.storage if source is Tier.STORAGE else found.cpu).append(block)
        return count == len(sources)

    def _fitting(self, sources: Sequence[Tier]) -> int:
        """The leading blocks that fit on the device. Stored ones that do not are misses.

        Raises:
            NoRoom: the first one that does not fit is in host memory.
        """
        available = self._cache.available
        if len(sources) > available and sources[available] is Tier.HOST:
            raise NoRoom(len(sources), available)
        return min(len(sources), available)

    def _hold(self, record: RequestRecord, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Index blocks that have arrived, held by the request."""
        cache = self._cache
        cache.blocks.index(blocks)
        for key, block in zip(keys, blocks, strict=True):
            parent = record.nodes[-1] if record.nodes else None
            record.nodes.append(cache.index.add(key, parent, block))
        if blocks and cache.reports is not None:
            cache.reports.added(record, len(blocks))

    # -- AttentionStore

    def _fetch(self, request: str, record: RequestRecord, full: int, found: PrefixMatch) -> None:
        """Read blocks from AttentionStore, which finds them by tokens alone. So requests with media
        are not read."""
        cache, direct = self._cache, self._cache.direct
        start = len(record.nodes)
        count = min(full - start, cache.available)
        if direct is None or record.has_media or count < 1 or cache.interrupted():
            return
        cache.make_room(count)
        blocks = cache.blocks.take(count, request)
        begun = time.monotonic()
        try:
            tokens = record.path.tokens(0, start + count)
            got = direct.fetch(tokens, start, blocks, cache.interrupted)
        except CallInFlight as late:
            log.error("AttentionStore does not answer: blocks not used", blocks=count)
            cache.lose(blocks, late.answer.done)  # the SDK may write them before it returns
            return
        except KVActorsError as error:
            log.error("AttentionStore not read", error=str(error))
            got = 0
        found.storage_seconds += time.monotonic() - begun
        cache.blocks.give(blocks[got:], request)
        found.storage = blocks[:got]
        self._hold(record, record.hashes(start, start + got), blocks[:got])
