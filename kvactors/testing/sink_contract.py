"""Conformance suite of sinks: subclass `SinkContract`, implement `make` and `held`, and let pytest
(with pytest-asyncio, in either mode) collect the class.

    class TestMySink(SinkContract):
        async def make(self, folder):
            return MySink(folder / "index")

        async def held(self, sink):
            return sink.index.block_hashes()
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks import MemorySink, Sink, require_sink
from kvactors.settings import Config
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.testing import asyncio_marks
from kvactors.types import Tier

if TYPE_CHECKING:
    from kvactors.cache import KVCache

BLOCK = 4
"""Tokens of a block."""

CALL_LIMIT = 20.0
"""Seconds that a call to a sink may take here."""

CLOSE_LIMIT = 5.0
"""Seconds that `close` may take here."""


class Served:
    """A cache with a sink, the deliveries of the sink as the notifier makes them, and what the sink
    must hold."""

    cache: KVCache

    def __init__(self, sink: Sink, mirror: MemorySink) -> None:
        self.sink = sink
        self.calls: list[Sequence[FlushTask]] = []
        self.epoch = 0
        self.complaint = ""
        self._mirror = mirror
        self._deliver, self._begin = sink.deliver, sink.begin_epoch
        sink.deliver = self.deliver  # type: ignore[method-assign]
        sink.begin_epoch = self.begin_epoch  # type: ignore[method-assign]

    async def begin_epoch(self, epoch: int) -> None:
        self.calls.clear()
        self.epoch = epoch
        await self._begin(epoch)

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Record a call, and check the sink's count of acknowledged tasks after it."""
        await self._deliver(tasks)
        self.calls.append(tasks)
        count = self.sink.num_acknowledged
        if not 0 <= count <= len(tasks):
            self.complaint = (
                f"num_acknowledged is {count} after a call of {len(tasks)} tasks: it counts the "
                "leading tasks of this call"
            )

    async def serve(self, *prompts: list[int]) -> None:
        """Serve requests and wait until the sinks have acknowledged all changes."""
        for prompt in prompts:
            lease = await self.cache.acquire("request", prompt)
            await lease.wait_ready()
            await lease.finish(lease.num_tokens)
        await self.cache.wait_flushed(CALL_LIMIT)

    @property
    def expected(self) -> set[bytes]:
        """Hashes of the blocks that are resident on a tier that the sink is sent."""
        return set().union(*self._mirror.view().values())


def prompt(seed: int, blocks: int = 5) -> list[int]:
    """Tokens of a request."""
    return [
        int(token) for token in np.random.default_rng(seed).integers(0, 1 << 32, blocks * BLOCK)
    ]


class SinkContract(ABC):
    """Tests of one sink.

    The cache has fewer device blocks and host slots than the requests need, so blocks move and are
    evicted.
    """

    pytestmark = asyncio_marks()

    @abstractmethod
    async def make(self, folder: Path) -> Sink:
        """A sink, not open yet. folder: for what its index keeps. Sinks made with the same folder
        inform the same index."""

    @abstractmethod
    async def held(self, sink: Sink) -> Collection[bytes]:
        """Hashes of the blocks that are resident on any tier, according to the index."""

    @asynccontextmanager
    async def served(self, folder: Path) -> AsyncIterator[Served]:
        sink = await self.make(folder)
        require_sink(sink)
        wanted = sink.filter
        tiers = tuple(str(tier.name).lower() for tier in Tier if wanted.tiers & tier)
        mirror = MemorySink(
            MemorySinkConfig(
                name="mirror of the contract",
                tiers=tiers,  # type: ignore[arg-type]
                granularity="node" if wanted.node else "per_tier",
                report_gains_at="request_finish" if wanted.at_finish else "commit",
            ),
            BLOCK,
        )
        served = Served(sink, mirror)
        config = Config.from_mapping(
            {
                "cache": {"model": "contract", "block_size": BLOCK},
                "layout": {"kind": "gqa", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
                "device": {"num_blocks": 8},
                "host": {"slots": 6, "transit_slots": 4},
            }
        )
        from kvactors.opening import open_cache

        async with open_cache(config, sinks=[sink, mirror]) as served.cache:
            yield served

    async def agrees(self, served: Served) -> None:
        """AssertionError unless the index holds what the tiers hold."""
        assert not served.complaint, served.complaint
        held, expected = set(await self.held(served.sink)), served.expected
        lacking, wrong = expected - held, held - expected
        assert not lacking, (
            f"{len(lacking)} of {len(expected)} resident blocks are not in the index"
        )
        assert not wrong, f"{len(wrong)} blocks in the index are resident nowhere"

    async def test_gains_and_losses_arrive(self, tmp_path: Path) -> None:
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1))
            assert served.expected
            await self.agrees(served)
            await served.serve(prompt(1, 7), prompt(2), prompt(3), prompt(1))
            await self.agrees(served)

    async def test_a_clear_removes_everything(self, tmp_path: Path) -> None:
        """Losses may come as one task (`takes_clear`)."""
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1), prompt(2))
            await served.cache.clear()
            await served.cache.wait_flushed(CALL_LIMIT)
            assert not served.expected
            await self.agrees(served)
            await served.serve(prompt(1))
            await self.agrees(served)

    async def test_a_new_epoch_discards_what_was_sent(self, tmp_path: Path) -> None:
        """Nothing else reports that a process or the notifier has restarted."""
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1))
            await served.sink.begin_epoch(served.epoch + 1)
            assert not list(await self.held(served.sink)), "blocks of an earlier epoch are left"

    async def test_a_resync_sends_everything_again(self, tmp_path: Path) -> None:
        """The same epoch begins again (or, with `repeats`, blocks are sent twice)."""
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1), prompt(2))
            await served.cache.resync(served.sink.name)
            await served.cache.wait_flushed(CALL_LIMIT)
            await self.agrees(served)

    async def test_the_next_process_begins_with_an_empty_index(self, tmp_path: Path) -> None:
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1))
        async with self.served(tmp_path) as served:
            await served.serve(prompt(2))
            await self.agrees(served)

    async def test_a_call_that_is_repeated_changes_nothing(self, tmp_path: Path) -> None:
        """A call that misses its deadline is made again, although the index may have taken it."""
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1), prompt(2))
            with anyio.fail_after(CALL_LIMIT):
                await served.sink.deliver(list(served.calls[-1]))
            await self.agrees(served)

    async def test_a_call_that_is_cancelled_can_be_made_again(self, tmp_path: Path) -> None:
        """A cancelled call may have delivered any part of its tasks."""
        async with self.served(tmp_path) as served:
            await served.serve(prompt(1), prompt(2))
            epoch = served.epoch
            tasks = [task for call in served.calls for task in call]
            await served.sink.begin_epoch(epoch)
            call = asyncio.ensure_future(served.sink.deliver(tasks))
            await asyncio.sleep(0)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            with anyio.fail_after(CALL_LIMIT):
                await served.sink.begin_epoch(epoch)
                await served.sink.deliver(tasks)
            await self.agrees(served)

    async def test_a_sink_closes_soon_also_after_an_open_that_was_cancelled(
        self, tmp_path: Path
    ) -> None:
        """`close` follows `open` in any case."""
        sink = await self.make(tmp_path)
        opening = asyncio.ensure_future(sink.open())
        await asyncio.sleep(0)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        await self._close(sink)
        sink = await self.make(tmp_path)
        await sink.open()
        await self._close(sink)

    async def _close(self, sink: Sink) -> None:
        with anyio.move_on_after(CLOSE_LIMIT) as scope:
            await sink.close()
        assert not scope.cancelled_caught, f"close has not ended in {CLOSE_LIMIT} s"
