"""Reports of device and host blocks to indexes: AttentionStore's, and those of routers."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.flush_notifier.messages import PLAIN, PathCached
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.identity import CacheScope
from kvactors.integrations.fastdeploy.block_index import IndexedBlock
from kvactors.integrations.fastdeploy.requests import RequestRecord
from kvactors.tier_cache.answers import TierEvent
from kvactors.tier_cache.loop_thread import LoopThread
from kvactors.tier_cache.paths import DescribedPath
from kvactors.tier_cache.sink_feed import SinkFeed
from kvactors.tier_cache.sink_service import SinkService
from kvactors.types import Reason, Tier

REPORTED = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)


class IndexReports:
    """Keeps sinks informed, on an event loop in a separate thread. No call waits for a sink.

    Args:
        sinks: with different names, not opened yet.
        scope: of every request.
        fingerprint: of the blocks' layout. With the scope it gives the root hash of all paths.
        block_size: tokens of a block.
        num_blocks: blocks that device and host hold at most.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        scope: CacheScope,
        fingerprint: bytes,
        block_size: int,
        num_blocks: int,
    ) -> None:
        feed = self._feed = SinkFeed(REPORTED, block_size, scope, fingerprint, num_blocks)
        feed.token_root = scope.root(fingerprint)
        self._service = SinkService(feed, sinks)
        self._thread = LoopThread([self._service])
        feed.wake = lambda: self._thread.call(self._service.take)

    def open(self, limit: float) -> None:
        """Open the sinks.

        Raises:
            SinkError: a sink cannot work.
            StoreError: they are not open after `limit` seconds.
        """
        self._thread.open(limit)

    def added(self, record: RequestRecord, count: int) -> None:
        """The last `count` blocks of a request are on the device."""
        start, stop = len(record.nodes) - count, len(record.nodes)
        self._announce(record, start, Reason.COMMIT)  # before they are described: not finished yet
        keys = [node.hash for node in record.nodes[start:]]
        self._feed.describe(
            DescribedPath(
                keys,
                record.path.tokens(start, stop),
                record.nodes[start - 1].hash if start else None,
                None,
                None,
                {i - start: extra for i, extra in record.path.extra_keys(start, stop)},
            )
        )
        self._feed.record(Tier.DEVICE, True, keys, Reason.COMMIT)

    def finished(self, record: RequestRecord) -> None:
        """A request has finished: its path from block 0 on is on this node."""
        if record.nodes:
            self._announce(record, 0, Reason.REQUEST_FINISH)

    def _announce(self, record: RequestRecord, start: int, reason: Reason) -> None:
        stop = len(record.nodes)
        self._feed.announce(
            PathCached(
                root=record.root,
                tokens=record.path.tokens(start, stop),
                hashes=record.path.hashes(start, stop),
                start=start,
                count=stop - start,
                tier=Tier.DEVICE,
                reason=reason,
                parent=record.nodes[start - 1].hash if start else record.root,
                scope=PLAIN,
                extra_keys=record.path.extra_keys(start, stop),
            )
        )

    def removed(self, blocks: Sequence[IndexedBlock], reason: Reason) -> None:
        """Blocks have left the device, children before parents."""
        self._feed.record(Tier.DEVICE, False, [block.hash for block in blocks], reason)

    def moved(self, events: Sequence[TierEvent]) -> None:
        """Host memory and storage have changed."""
        for event in events:
            self._feed.record(event.tier, event.stored, event.keys, event.reason)

    def flush(self) -> None:
        """Send the changes."""
        self._feed.flush()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why sinks do not work."""
        return self._service.troubles

    def close(self, limit: float) -> None:
        """Send the remaining changes and close the sinks, in about `limit` seconds."""
        self._thread.close(limit)
