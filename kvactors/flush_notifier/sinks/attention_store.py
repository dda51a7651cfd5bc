"""AttentionStore's token index as a sink: which token blocks this node holds on any tier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.attention_sdk import MARGIN, Sdk, SdkSettings
from kvactors.errors import SdkError, SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.journal import Journal, PublishedBlocks, Retraction
from kvactors.settings.sinks import AttentionStoreSinkConfig
from kvactors.types import Residency, split_hashes

RETRY_AT_CLOSE = (0.0, 0.05, 0.2, 0.8)
"""Seconds before each attempt to retract everything at the end."""


class AttentionStoreSink(Sink):
    """One index call a task, with the complete token path.

    The index cannot be emptied. The sink records what it published, in a journal if one is
    configured, and retracts that when an epoch begins.
    """

    by_tokens = True
    repeats = True

    def __init__(self, config: AttentionStoreSinkConfig, settings: SdkSettings) -> None:
        super().__init__(config, settings.block_size)
        self.announces_full = config.announce == "full"
        self.sdk = Sdk(settings, "index")
        self.ready_timeout = settings.ready_timeout + MARGIN
        self._published = PublishedBlocks(settings.block_size)
        self._answers = True  # whether the last call was answered
        self._log = get_logger()
        self._journal = Journal(config.journal, self._published)
        self._retracts_at_close = not config.journal
        if config.journal and not self._journal.path.parent.is_dir():
            raise SinkError(f"sink {self.name!r}: {self._journal.path.parent} is not a folder")

    async def open(self) -> None:
        await self._journal.read()
        try:
            await self.sdk.open()
        except BaseException:
            self.sdk.close()
            raise

    async def begin_epoch(self, epoch: int) -> None:
        """Retract what was published in earlier epochs. An interrupted retraction is continued by
        the next attempt."""
        for path in list(self._published.retractions()):
            await self._retract(path)
        await self._journal.rewrite()

    async def _retract(self, path: Retraction) -> None:
        await self._flush(path.tokens, path.start, resident=False)
        self._published.remove(path.hashes)

    async def _flush(self, tokens: bytes, start: int, *, resident: bool) -> None:
        self._answers = False
        try:
            await self.sdk.flush(np.frombuffer(tokens, "<u4"), start, resident=resident)
        except SdkError:
            self._answers = True  # an error is an answer
            raise
        self._answers = True

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.num_acknowledged = 0
        gains = [
            task
            for task in tasks
            if task.residency is Residency.RESIDENT and not self._published.holds(task)
        ]
        for task in gains:
            # before the call: a cancelled call may still be carried out
            hashes = split_hashes(task.hashes)
            self._published.add(task.parent, task.start_block_idx, hashes, task.tokens)
        await self._journal.resident(gains)
        gone: list[bytes] = []
        try:
            for task in tasks:
                resident = task.residency is Residency.RESIDENT
                await self._flush(task.tokens, task.start_block_idx, resident=resident)
                if not resident:
                    gone += split_hashes(task.hashes)
                self.num_acknowledged += 1
        finally:
            self._published.remove(gone)
        await self._journal.gone(gone)

    async def _retract_all(self) -> None:
        """Retract everything. A path whose retraction fails does not keep the others from theirs,
        and is tried again a few times.
        """
        for pause in RETRY_AT_CLOSE:
            await asyncio.sleep(pause)
            failure: SdkError | None = None
            for path in list(self._published.retractions()):
                try:
                    await self._retract(path)
                except SdkError as error:
                    failure = error
            if failure is None:
                return
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Retract everything, since this process holds nothing after its end. With a journal the
        next process does that. Skipped if the index does not answer."""
        try:
            if self._retracts_at_close and self._answers:
                await self._retract_all()
        except SdkError as error:
            self._log.warning(
                "retraction at close failed",
                sink=self.name,
                error=str(error),
                blocks=len(self._published),
            )
        finally:
            self.sdk.close()
