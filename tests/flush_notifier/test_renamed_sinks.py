"""Sinks written against the method names up to version 0.1 work, and warn."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.flush_notifier.filter import SinkFilter
from kvactors.flush_notifier.messages import FlushTask, RequestScope
from kvactors.flush_notifier.sinks import MemorySink, Sink
from kvactors.sink_config import MemorySinkConfig
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier.helpers import BLOCK, Wired, announced, memory, names

OLD_NAMES = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


def old_style() -> Sink:
    """An embedder's sink: `begin`, `attach` and `taken`."""

    class Old(Sink):
        def __init__(self) -> None:
            super().__init__("old")
            self.epochs: list[int] = []
            self.keys: list[bytes] = []
            self.sources = 0
            self.fail_after = -1

        def attach(self, holdings):
            self.sources += 1

        async def begin(self, epoch):
            self.epochs.append(epoch)

        async def deliver(self, tasks):
            for done, task in enumerate(tasks, 1):
                assert task.residency is Residency.RESIDENT
                self.keys += [task.hashes]
                self.taken = done
                if len(self.keys) == self.fail_after:
                    raise OSError("down")

    return Old()


def old_style_memory() -> MemorySink:
    """An embedder's subclass of a shipped sink that calls the method above it by the old name."""

    class OldMemory(MemorySink):
        begun = 0

        async def begin(self, epoch):
            self.begun += 1
            await super().begin(epoch)

    return OldMemory(MemorySinkConfig(name="old", tiers=("device", "host")), BLOCK)


def old_style_wrapper(inner: Sink) -> Sink:
    """An embedder's sink around another, without `super().__init__`."""

    class OldWrapper(Sink):
        def __init__(self) -> None:
            self.name, self.block_size, self.view_of = inner.name, BLOCK, inner.view_of

        @property
        def taken(self):
            return inner.taken

        @taken.setter
        def taken(self, count):
            inner.taken = count

        def attach(self, holdings):
            inner.attach(holdings)

        async def begin(self, epoch):
            await inner.begin(epoch)

        async def deliver(self, tasks):
            await inner.deliver(tasks)

    return OldWrapper()


@OLD_NAMES
async def test_old_methods_and_the_old_counter_are_used():
    old = old_style()
    old.fail_after = 1
    wired = Wired(old)
    async with wired.running():
        await wired.tell(announced(1), announced(2))
        await wired.settle()
    assert (old.epochs, old.sources) == ([100], 1)
    assert sorted(old.keys) == sorted([names(1)[0], names(2)[0]]), (
        "the task before the failure is not sent again"
    )


@OLD_NAMES
async def test_a_super_call_by_the_old_name_reaches_the_method_above():
    old = old_style_memory()
    wired = Wired(old)
    async with wired.running():
        await wired.tell(announced(1, 2))
        await wired.settle()
    assert (old.begun, old.epochs) == (1, [100])
    assert set().union(*old.view().values()) == set(names(1, 2))


@OLD_NAMES
async def test_a_wrapper_by_the_old_names_passes_everything_on():
    inner = memory("inner")
    wrapper = old_style_wrapper(inner)
    assert isinstance(wrapper.filter, SinkFilter)
    wired = Wired(wrapper)
    async with wired.running():
        await wired.tell(announced(1, 2))
        await wired.settle()
    wrapper.num_acknowledged = 7
    assert (inner.epochs, inner.num_acknowledged, wrapper.num_acknowledged) == ([100], 7, 7)
    assert set().union(*inner.view().values()) == set(names(1, 2))


@OLD_NAMES
async def test_a_cache_takes_a_sink_by_the_old_names():
    old = old_style()
    async with kvactors.open(sinks=[old]) as cache:
        await cache.wait_flushed()
    assert len(old.epochs) == 1


def test_each_old_name_warns():
    with (
        pytest.warns(DeprecationWarning, match="Old.begin is deprecated, use begin_epoch"),
        pytest.warns(DeprecationWarning, match="Old.attach is deprecated, use set_snapshot_source"),
    ):
        old = old_style()
    with pytest.warns(DeprecationWarning, match="taken is deprecated, use num_acknowledged"):
        old.taken = 3
    assert old.num_acknowledged == 3
    with pytest.warns(DeprecationWarning, match="view_of is deprecated, use filter"):
        assert old.view_of is old.filter
    with pytest.warns(DeprecationWarning, match="attach is deprecated"):
        memory("new").attach(lambda **_: iter(()))


def test_a_sink_without_the_required_methods_is_abstract():
    class Half(Sink):
        async def deliver(self, tasks): ...

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_the_earlier_name_of_a_task_s_scope_warns_and_works():
    scope = RequestScope("adapter", "tenant")
    task = FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier.DEVICE, Reason.CLEAR, 1, scope, ())
    with pytest.warns(DeprecationWarning, match=r"FlushTask\.origin.*FlushTask\.scope") as warned:
        assert task.origin is scope
    assert warned[0].filename == __file__
