"""AttentionStore's token index as a sink: which token blocks are on this node, whichever tier holds
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.attention_store import MARGIN, Sdk
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.journal import Journal
from kvactors.flush_notifier.sinks.told import Told
from kvactors.sdk_settings import SdkSettings
from kvactors.sink_config import AttentionStoreSinkConfig
from kvactors.types import Residency, split_keys


class AttentionStoreSink(Sink):
    """One index call a task, with the complete token path. Since the index has no word for
    "everything is void", the sink remembers what it told, in a journal if it has one, and takes it
    back when a life begins."""

    by_tokens = True
    repeats = True

    def __init__(self, config: AttentionStoreSinkConfig, settings: SdkSettings) -> None:
        super().__init__(config, settings.block_size)
        self.announces_full = config.announce == "full"
        self.sdk = Sdk(settings, "index")
        self.ready_timeout = settings.ready_timeout + MARGIN
        self._told = Told(settings.block_size)
        self._well = True  # whether the last call was answered
        self._log = get_logger()
        self._journal = Journal(config.journal) if config.journal else None
        if self._journal is not None and not self._journal.path.parent.is_dir():
            raise SinkError(f"sink {self.name!r}: {self._journal.path.parent} is not a folder")

    async def open(self) -> None:
        """Read the journal, connect, wait until the other side is ready. SinkError,
        DeadlineExceeded."""
        if self._journal is not None:
            await self._journal.read(self._told)
        try:
            await self.sdk.open()
        except BaseException:
            self.sdk.close()
            raise

    async def begin(self, epoch: int) -> None:
        """Take back what was told in earlier lives. Given up in the middle, the next attempt goes
        on."""
        await self._take_back()
        if self._journal is not None:
            await self._journal.rewrite(self._told)

    async def _take_back(self) -> None:
        for path in list(self._told.take_back()):
            await self._flush(path.tokens, path.start, resident=False)
            self._told.gone(path.names)

    async def _flush(self, tokens: bytes, start: int, *, resident: bool) -> None:
        self._well = False
        await self.sdk.flush(np.frombuffer(tokens, "<u4"), start, resident=resident)
        self._well = True

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Tell the index, in order. SinkError at the first call that fails; what came before it is
        told all the same."""
        self.taken = 0
        gains = [task for task in tasks if task.residency is Residency.RESIDENT]
        gains = [task for task in gains if not self._told.holds(task)]
        for task in gains:
            self._told.resident(
                task
            )  # before the call: a call that is given up may still be carried out
        if self._journal is not None:
            await self._journal.resident(gains, self._told)
        gone: list[bytes] = []
        try:
            for task in tasks:
                resident = task.residency is Residency.RESIDENT
                await self._flush(task.tokens, task.start_block_idx, resident=resident)
                if not resident:
                    gone += split_keys(task.keys)
                self.taken += 1
        finally:
            self._told.gone(gone)
        if self._journal is not None:
            await self._journal.gone(gone, self._told)

    async def close(self) -> None:
        """A process that ends holds nothing. Without a journal nobody could say so later: it is
        said now, if the index still answers."""
        try:
            if self._journal is None and self._well:
                await self._take_back()
        except SinkError as error:
            self._log.warning(
                "the index was not told that this node stops", sink=self.name, error=str(error)
            )
        finally:
            self.sdk.close()
