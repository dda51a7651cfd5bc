"""The conformance suites pass for kvactors' classes and fail for broken ones."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks import MemorySink, Sink
from kvactors.layout import GQALayout, Layout, Role
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.storage.backend import Backend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing import LayoutContract, SinkContract, StoreContract, sink_contract
from kvactors.types import Residency, split_hashes

BELOW = ("device", "host")


class IndexSink(Sink):
    """A right one: a set of blocks for each tier, as an author would write it."""

    def __init__(self, config: Any = "index", block_size: int = 4) -> None:
        super().__init__(config, block_size)
        self.blocks: set[tuple[bytes, int]] = set()

    async def begin_epoch(self, epoch: int) -> None:
        self.blocks.clear()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        for task in tasks:
            found = {(one, int(task.tier)) for one in split_hashes(task.hashes)}
            if task.residency is Residency.RESIDENT:
                self.blocks |= found
            else:
                self.blocks -= found


class TestIndexSink(SinkContract):
    async def make(self, folder):
        return IndexSink()

    async def held(self, sink):
        return {one for one, _ in sink.blocks}


class TestMemorySink(SinkContract):
    async def make(self, folder):
        return MemorySink(MemorySinkConfig(tiers=BELOW), 4)

    async def held(self, sink):
        return set().union(*sink.view().values())


class TestNodeSink(TestMemorySink):
    async def make(self, folder):
        return MemorySink(MemorySinkConfig(granularity="node", report_gains_at="request_finish"), 4)


class KeepsLosses(IndexSink):
    async def deliver(self, tasks):
        await super().deliver([t for t in tasks if t.residency is Residency.RESIDENT])


class KeepsEpochs(IndexSink):
    async def begin_epoch(self, epoch):
        pass


class TakesNothingTwice(IndexSink):
    async def deliver(self, tasks):
        for task in tasks:
            found = {(one, int(task.tier)) for one in split_hashes(task.hashes)}
            if task.residency is Residency.RESIDENT and found & self.blocks:
                raise ValueError("the block is there already")
            await super().deliver([task])


class CountsTooMany(IndexSink):
    async def deliver(self, tasks):
        await super().deliver(tasks)
        self.num_acknowledged = len(tasks) + 1


class HangsAtClose(IndexSink):
    async def close(self):
        await asyncio.Event().wait()


class NeedsOpenToClose(IndexSink):
    async def open(self):
        await asyncio.sleep(0.01)
        self.connection = True

    async def close(self):
        assert self.connection


class SurvivesRestarts(IndexSink):
    left: ClassVar[set[tuple[bytes, int]]] = set()

    def __init__(self, config: Any = "index", block_size: int = 4) -> None:
        super().__init__(config, block_size)
        self.blocks = SurvivesRestarts.left

    async def begin_epoch(self, epoch):
        pass


async def fails(contract: Any, name: str, folder: Any) -> bool:
    """Whether a test of a contract fails."""
    test = getattr(contract, name)
    wanted = {"tmp_path": folder} if "tmp_path" in inspect.signature(test).parameters else {}
    try:
        done = test(**wanted)
        if inspect.isawaitable(done):
            await done
    except Exception:
        return True
    return False


@pytest.mark.parametrize(
    ("broken", "finds"),
    [
        (KeepsLosses, "test_gains_and_losses_arrive"),
        (KeepsEpochs, "test_a_new_epoch_discards_what_was_sent"),
        (TakesNothingTwice, "test_a_call_that_is_repeated_changes_nothing"),
        (CountsTooMany, "test_gains_and_losses_arrive"),
        (HangsAtClose, "test_a_sink_closes_soon_also_after_an_open_that_was_cancelled"),
        (NeedsOpenToClose, "test_a_sink_closes_soon_also_after_an_open_that_was_cancelled"),
        (SurvivesRestarts, "test_the_next_process_begins_with_an_empty_index"),
    ],
)
async def test_a_broken_sink_fails(monkeypatch, tmp_path, broken, finds):
    monkeypatch.setattr(sink_contract, "CLOSE_LIMIT", 0.05)
    monkeypatch.setattr(sink_contract, "CALL_LIMIT", 2.0)

    class Broken(TestIndexSink):
        async def make(self, folder):
            return broken()

    assert await fails(Broken(), finds, tmp_path)


class Pages(Layout):
    """A right layout of another package: opaque pages of one tensor."""

    kind = "pages"

    def __init__(self, block_size: int = 4, num_layers: int = 2, page: int = 48) -> None:
        self.page = page
        super().__init__(block_size, num_layers)

    def roles(self, layer):
        return [Role("page", (self.page,), "uint8")]

    @classmethod
    def from_settings(cls, settings, block_size):
        return cls(block_size, settings["num_layers"], settings["page"])


class TestPages(LayoutContract):
    settings: ClassVar = {"num_layers": 2, "page": 48}

    def make(self):
        return Pages()

    def variants(self):
        return [Pages(page=64), Pages(num_layers=3), Pages(block_size=8)]


class TestGQA(LayoutContract):
    settings: ClassVar = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"}

    def make(self):
        return GQALayout(2, 1, 8, 4, "uint8")


class Overlapping(Pages):
    """A block's size is not that of its pieces."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.block_bytes -= 1


class NewEachTime(Pages):
    def _fingerprint(self):
        return os.urandom(32)


class OneForAll(Pages):
    def _fingerprint(self):
        return bytes(32)


class IgnoresSettings(Pages):
    @classmethod
    def from_settings(cls, settings, block_size):
        return cls(block_size)


class TakesAName(Pages):
    kind = "gqa"


class ChecksNothing(Pages):
    def verify(self, shapes, num_blocks):
        pass


@pytest.mark.parametrize(
    ("broken", "finds"),
    [
        (Overlapping, "test_pieces_are_in_contract_order"),
        (NewEachTime, "test_the_same_settings_make_the_same_layout"),
        (OneForAll, "test_different_layouts_have_different_fingerprints"),
        (TakesAName, "test_different_layouts_have_different_fingerprints"),
        (ChecksNothing, "test_an_engines_regions_are_checked"),
        (IgnoresSettings, "test_settings_describe_the_layout"),
    ],
)
async def test_a_broken_layout_fails(tmp_path, broken, finds):
    class Broken(LayoutContract):
        settings: ClassVar = {"num_layers": 2, "page": 96}

        def make(self):
            return broken(page=96)

        def variants(self):
            return [broken(page=64), broken(page=32)]

    assert await fails(Broken(), finds, tmp_path)


class StoreOf(StoreContract):
    """The suite over a class of back ends."""

    def __init__(self, kind: type[Backend]) -> None:
        self._kind = kind

    async def make(self, folder, capacity):
        return self._kind(bytes(32), self.block_bytes, capacity)


class FlipsBytes(MemoryBackend):
    async def load(self, key, into):
        found = await super().load(key, into)
        if found == Outcome.OK:
            into[7] ^= 1
        return found


class WritesNothing(MemoryBackend):
    async def save(self, key, data):
        return Outcome.OK


class NeverForgets(MemoryBackend):
    async def erase(self, keys):
        pass

    async def remove(self, keys):
        pass


class Boundless(MemoryBackend):
    def __init__(self, digest, block_bytes, capacity=0):
        super().__init__(digest, block_bytes, 0)


@pytest.mark.parametrize("broken", [FlipsBytes, WritesNothing, NeverForgets, Boundless])
async def test_a_broken_back_end_fails(tmp_path, broken):
    names = [name for name in dir(StoreContract) if name.startswith("test_")]
    failed = [
        name
        for i, name in enumerate(names)
        if await fails(StoreOf(broken), name, made(tmp_path / str(i)))
    ]
    assert failed
    sound = [
        name
        for i, name in enumerate(names)
        if await fails(StoreOf(MemoryBackend), name, made(tmp_path / f"sound-{i}"))
    ]
    assert sound == []


def made(folder):
    folder.mkdir()
    return folder
