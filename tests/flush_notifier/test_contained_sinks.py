"""A sink is foreign code: with any error, result, hang or ignored cancellation the notifier goes
on, the
other sinks are right, it is visible, logged once a change of state, and the sink is right again
when it works again."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest
import structlog

import kvactors
import kvactors.flush_notifier.sinks
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.flush_notifier.sinks import MemorySink
from kvactors.settings import Config
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.types import Reason, Tier
from tests.flush_notifier.helpers import BLOCK, Wired, announced, memory, names, until

NOTHING = {tier: set() for tier in Tier}


class PanicError(BaseException):
    """As native extensions raise."""


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


async def hang():
    await asyncio.Event().wait()


async def ignore_cancellation():
    """Goes on for a while when it is cancelled."""
    end = asyncio.get_running_loop().time() + 0.8
    while asyncio.get_running_loop().time() < end:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


async def cancel_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(10)


def raises(error):
    async def fault():
        raise error

    return fault


FAULTS = {
    "Exception": raises(ValueError("no")),
    "CancelledError": raises(asyncio.CancelledError()),
    "BaseException": raises(PanicError("rust")),
    "GeneratorExit": raises(GeneratorExit()),
    "SystemExit": raises(SystemExit(3)),
    "StopAsyncIteration": raises(StopAsyncIteration()),
    "unprintable": raises(Unprintable()),
    "group": raises(BaseExceptionGroup("several", [PanicError(), ValueError()])),
    "hang": hang,
    "ignores cancellation": ignore_cancellation,
    "cancels itself": cancel_itself,
}
HANGING = ("hang", "ignores cancellation")


class Bad(MemorySink):
    """Misbehaves in `where` by `fault` while `fault` is set."""

    def __init__(self, name="bad", where="deliver", fault=None):
        super().__init__(MemorySinkConfig(name=name, tiers=("device", "host")), BLOCK)
        self.where, self.fault, self.running = where, fault, 0
        self.overlaps = 0

    async def maybe(self, where):
        self.running += 1
        try:
            self.overlaps += self.running > 1
            if self.fault is not None and where == self.where:
                await self.fault()
                raise SinkError("nothing was taken")
        finally:
            self.running -= 1

    def set_snapshot_source(self, holdings):
        if self.fault is not None and self.where == "attach":
            raise PanicError

    async def begin_epoch(self, epoch):
        await self.maybe("begin")
        await super().begin_epoch(epoch)

    async def deliver(self, tasks):
        await self.maybe("deliver")
        await super().deliver(tasks)


@pytest.mark.parametrize("where", ["begin", "deliver"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_notifier_survives_every_error_of_a_sink_and_the_sink_recovers(fault, where):
    good, bad = memory("good"), Bad(where=where, fault=FAULTS[fault])
    wired = Wired(good, bad, timeout_s=0.5 if fault in HANGING else 10.0)
    with structlog.testing.capture_logs() as logs:
        async with wired.running():
            await wired.tell(announced(1, 2))
            await until(lambda: wired.actor.sinks.statistics()[1].failures >= 2)
            await wired.tell(
                announced(3), BlocksRemoved(names(1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP)
            )
            await until(lambda: good.view()[Tier.DEVICE] == {*names(1), *names(3)})
            await until(
                lambda: wired.actor.sinks.statistics()[0].pending == 0
            )  # the notifier has the answer, too
            ok, failing = wired.actor.sinks.statistics()
            assert (ok.failures, ok.last_error, ok.failing_for) == (0, "", 0.0)
            assert failing.failures
            assert failing.last_error
            assert failing.failing_for > 0
            assert failing.pending >= 1
            bad.fault = None
            await wired.settle(20.0)
            assert bad.view() == good.view()
            assert bad.overlaps == 0, "one call at a time"
            assert wired.ref.incarnation == 0, "the notifier never failed"
            statistics = wired.actor.sinks.statistics()[1]
            assert (statistics.failures, statistics.failing_for) == (0, 0.0)
            assert statistics.last_error
    about = [entry for entry in logs if entry.get("sink") == "bad"]
    assert [entry["event"] for entry in about] == ["sink fails", "sink works again"], (
        "once a change of state"
    )


async def test_attach_that_raises_is_a_failure_of_the_sink():
    good, bad = memory("good"), Bad(where="attach", fault=hang)
    wired = Wired(good, bad)
    async with wired.running():
        await wired.tell(announced(1))
        await until(lambda: wired.actor.sinks.statistics()[1].failures >= 2)
        bad.fault = None
        await wired.settle()
        assert bad.view() == good.view() == NOTHING | {Tier.DEVICE: set(names(1))}


@pytest.mark.parametrize("taken", [None, "3", -1, 10**9, 2.0, True, PanicError])
async def test_a_count_of_taken_tasks_that_makes_no_sense_counts_as_none(taken):
    class Liar(Bad):
        async def deliver(self, tasks):
            await super().deliver(tasks) if self.fault is None else None
            if self.fault is not None:
                self.num_acknowledged = taken
                raise SinkError("nothing was taken")

    good, bad = memory("good"), Liar(fault=hang)
    wired = Wired(good, bad)
    async with wired.running():
        for i in range(5):
            await wired.tell(announced(i))
        await until(lambda: wired.actor.sinks.statistics()[1].failures >= 2)
        bad.fault = None
        await wired.settle()
        assert bad.view() == good.view()
        assert len(bad.view()[Tier.DEVICE]) == 5


async def test_a_sink_that_changes_its_batch_changes_its_own_copy():
    class Eater(Bad):
        async def deliver(self, tasks):
            await super().deliver(tasks)
            with pytest.raises((TypeError, AttributeError)):
                tasks.clear()

    good, bad = memory("good"), Eater()
    wired = Wired(good, bad)
    async with wired.running():
        await wired.tell(announced(1, 2))
        await wired.settle()
        assert bad.view() == good.view()
        assert wired.actor.sinks.statistics()[1].blocks == 2


async def test_methods_that_are_no_coroutines_are_failures_of_the_sink():
    class Plain(Bad):
        def deliver(self, tasks):
            return 5

    good, bad = memory("good"), Plain()
    wired = Wired(good, bad)
    async with wired.running():
        await wired.tell(announced(1))
        await until(lambda: wired.actor.sinks.statistics()[1].failures >= 2)
        assert "TypeError" in wired.actor.sinks.statistics()[1].last_error
        assert good.view()[Tier.DEVICE] == set(names(1))


async def test_an_incarnation_does_not_call_a_sink_before_the_call_of_the_last_one_has_ended():
    good, bad = memory("good"), Bad(fault=ignore_cancellation)
    wired = Wired(good, bad)
    async with wired.running():
        await wired.tell(announced(1))
        await until(lambda: bad.running)
        await wired.tell(kill())
        await until(lambda: wired.actor.incarnation == 1)
        bad.fault = None
        await wired.tell(announced(2))
        await wired.settle(20.0)
        assert good.epochs[-1] == bad.epochs[-1] == 101
        assert good.view() == bad.view() == NOTHING | {Tier.DEVICE: set(names(2))}
        assert bad.overlaps == 0


def kill():
    from kvactors.flush_notifier.messages import PathCached
    from tests.flush_notifier.helpers import ROOT

    return PathCached(ROOT, b"x", b"short", 0, 1, Tier.DEVICE, Reason.COMMIT, ROOT)


# -- a whole cache

CONFIG = Config.from_mapping(
    {
        "cache": {"block_size": 2},
        "device": {"num_blocks": 16},
        "host": {"slots": 16},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
        "flush": {"retry_min_s": 0.01, "retry_max_s": 0.05, "timeout_s": 0.2},
        "actors": {"drain_timeout_s": 2.0},
    }
)


async def request(cache, seed, blocks=3):
    async with await cache.acquire(f"r{seed}", [seed] * (2 * blocks)) as lease:
        await lease.wait_ready()
        await lease.commit(2 * blocks)


class BadClose(Bad):
    def __init__(self, fault):
        super().__init__("bad")
        self.closing = fault

    async def close(self):
        await self.closing()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_close_that_fails_neither_ends_in_an_error_nor_keeps_other_sinks_open(fault):
    closed = []

    class Good(Bad):
        async def close(self):
            closed.append(self.name)

    first, last = Good("first"), Good("last")
    with structlog.testing.capture_logs() as logs:
        async with kvactors.open(CONFIG, sinks=[first, BadClose(FAULTS[fault]), last]) as cache:
            await request(cache, 1)
            await cache.wait_flushed(10.0)
    assert closed == ["last", "first"]
    if fault != "ignores cancellation":  # this one ends in time by chance
        assert [entry["sink"] for entry in logs if "close" in entry["event"]] == ["bad"]


@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if fault not in ("hang", "ignores cancellation", "cancels itself")],
)
async def test_a_failed_open_is_a_sink_error_and_closes_the_opened_sinks(fault):
    closed = []

    class Good(Bad):
        async def close(self):
            closed.append(self.name)

    class BadOpen(Bad):
        async def open(self):
            await FAULTS[fault]()

    with pytest.raises(SinkError, match="bad"):
        async with kvactors.open(CONFIG, sinks=[Good("first"), BadOpen()]):
            raise AssertionError("not reached")
    assert closed == ["first"]


async def test_a_cache_with_failing_sinks_leaves_no_task_and_no_unseen_exception():
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
    bad = [
        Bad(f"bad{i}", where, fault)
        for i, (where, fault) in enumerate(
            [(w, f) for w in ("begin", "deliver") for f in FAULTS.values()]
        )
    ]
    async with kvactors.open(CONFIG, sinks=bad) as cache:
        for seed in range(5):
            await request(cache, seed)
        await asyncio.sleep(0.1)
    del cache, bad
    await until(lambda: len(asyncio.all_tasks()) == 1)
    gc.collect()
    await asyncio.sleep(0)
    assert seen == []


# -- sinks of a caller's own


class Small(kvactors.flush_notifier.sinks.Sink):
    """A sink as small as can be."""

    def __init__(self):
        super().__init__("small")
        self.epochs, self.taken_tasks = [], []

    async def begin_epoch(self, epoch):
        self.epochs.append(epoch)

    async def deliver(self, tasks):
        self.taken_tasks += tasks


async def test_a_sink_with_a_name_and_two_methods_is_enough():
    small = Small()
    async with kvactors.open(CONFIG, sinks=[small]) as cache:
        await request(cache, 1)
        await cache.wait_flushed(10.0)
        assert cache.sinks["small"] is small
    assert len(small.epochs) == 1
    assert sum(task.count for task in small.taken_tasks) == 3


@pytest.mark.parametrize("what", ["not a subclass", "no super().__init__", "no name", None])
async def test_an_object_that_is_no_sink_is_refused_by_name_and_opens_nothing(what):
    class Duck:
        async def begin_epoch(self, epoch): ...

        async def deliver(self, tasks): ...

    class Forgetful(Small):
        def __init__(self):
            pass

    class Nameless(Small):
        def __init__(self):
            super().__init__()
            self.name = ""

    wrong = {"not a subclass": Duck, "no super().__init__": Forgetful, "no name": Nameless}.get(
        what, lambda: None
    )()
    with pytest.raises(TypeError, match=type(wrong).__name__):
        async with kvactors.open(CONFIG, sinks=[wrong]):
            raise AssertionError("not reached")
