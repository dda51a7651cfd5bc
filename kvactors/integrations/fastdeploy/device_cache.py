"""Device blocks, their index, and the tiers and indexes that follow its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvactors.errors import ConfigError
from kvactors.integrations.fastdeploy.block_index import BlockIndex
from kvactors.integrations.fastdeploy.device_blocks import DeviceBlocks
from kvactors.integrations.fastdeploy.direct_storage import DirectStorage
from kvactors.integrations.fastdeploy.index_reports import IndexReports
from kvactors.integrations.fastdeploy.lower_tiers import LowerTiers
from kvactors.integrations.fastdeploy.requests import RequestRecord, Requests
from kvactors.types import Reason


class DeviceCache:
    """The cached blocks of one engine.

    Args:
        total: device blocks.

    Attributes:
        blocks: where each device block is.
        index: full blocks by hash.
        requests: those that hold blocks.
        lower: host memory and storage, None without.
        direct: AttentionStore as storage, None without.
        reports: informs indexes, None without.
        interrupted: whether a match is to wait no longer for storage.
    """

    def __init__(self, total: int) -> None:
        self.blocks = DeviceBlocks(total)
        self.index = BlockIndex()
        self.requests = Requests(self.blocks, self.index)
        self.lower: LowerTiers | None = None
        self.direct: DirectStorage | None = None
        self.reports: IndexReports | None = None
        self._late: list[tuple[Callable[[], bool], list[int]]] = []  # blocks that calls access
        self.interrupted: Callable[[], bool] = lambda: False

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.blocks.free + self.index.unreferenced

    def make_room(self, count: int) -> bool:
        """Evict until `count` blocks are free. Nothing is evicted if that is not possible."""
        lacking = count - self.blocks.free
        if lacking <= 0:
            return True
        if lacking > self.index.unreferenced:
            return False
        self.evict(lacking)
        return self.blocks.free >= count

    def evict(self, count: int) -> int:
        """Evict blocks, at most `count`, and return how many. Their bytes are in host memory before
        another request can get them.

        Raises:
            DeviceError: a copy does not end. Its device blocks are lost.
        """
        victims = self.index.evict(count)
        if not victims:
            return 0
        lower, reports = self.lower, self.reports
        if lower is not None:
            lower.host.enter()
            try:
                lower.host.keep(victims)
            except BaseException:
                self.lose(block.block for block in victims)
                raise
        self.report_moves()
        if reports is not None:
            kept = lower is not None and lower.slots > 0
            reports.removed(victims, Reason.DEVICE_EVICTION if kept else Reason.DEVICE_DROP)
        self.blocks.evict(block.block for block in victims)
        return len(victims)

    def commit(self, record: RequestRecord, own: Sequence[int]) -> None:
        """Index the next blocks of a request. See `Requests.commit`."""
        self.index.tick()
        added = self.requests.commit(record, own)
        if added and self.reports is not None:
            self.reports.added(record, added)

    def release(self, request: str) -> None:
        """A request holds nothing any more."""
        self.requests.release(request)
        self.settle()

    def settle(self) -> None:
        """A call of the engine begins: free what ended writes to storage and late calls have
        held."""
        self._report_finished(self.requests.settle())
        late, self._late = self._late, []
        for ended, blocks in late:
            if ended():
                self.blocks.regain(blocks)
            else:
                self._late.append((ended, blocks))

    def lose(self, blocks: Iterable[int], ended: Callable[[], bool] = lambda: False) -> None:
        """Blocks may still be accessed.

        Args:
            blocks: held or indexed.
            ended: whether they are accessed no more, and free. By default they never are.
        """
        lost = list(blocks)
        self.blocks.lose(lost)
        self._late.append((ended, lost))

    def _report_finished(self, records: Sequence[RequestRecord]) -> None:
        if self.reports is not None:
            for record in records:
                if record.finished:
                    self.reports.finished(record)

    def report_moves(self) -> None:
        """Pass the changes of the tiers below to indexes."""
        if self.reports is not None and self.lower is not None:
            self.reports.moved(self.lower.host.events())

    def reset(self) -> None:
        """Forget every block of device and host, and every request. Stored objects stay. Blocks
        that are written to storage are free when the writes have ended."""
        written = self.requests.clear()
        read = {node.block for record in written for node in record.nodes}
        self.lose(read, lambda: not any(record.writers for record in written))
        gone = self.index.clear()
        self.blocks.reset()
        self.settle()
        if self.lower is not None:
            self.lower.host.enter()
            self.lower.host.reset()
        self.report_moves()
        if self.reports is not None:
            self.reports.removed(gone, Reason.CLEAR)
            self.reports.flush()

    def resize(self, total: int) -> None:
        """Another number of device blocks.

        Raises:
            ConfigError: blocks are in use.
        """
        blocks = self.blocks
        used = len(blocks.held) + len(blocks.indexed) + len(blocks.lost)
        if total == self.blocks.total:
            return
        if used:
            raise ConfigError(
                f"total_block_num is {self.blocks.total} and cannot become {total}: {used} blocks "
                "are in use"
            )
        self.blocks.resize(total)

    def check(self) -> None:
        """AssertionError if blocks, index and references disagree, for tests."""
        self.blocks.check()
        self.index.check()
        if self.lower is not None:
            self.lower.host.tiers.check()
