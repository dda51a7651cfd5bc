"""Back ends that answer falsely, raise and leak: a miss, counted and logged, but no wrong byte, no
failed actor, and no slot that stays pinned."""

from __future__ import annotations

import asyncio
from hashlib import sha256

import pytest

import kvactors
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import PathPart
from kvactors.layout import make_layout
from kvactors.settings import Config
from kvactors.storage.attempts import FAILURES
from kvactors.storage.backend import ReadReport, WriteReport
from kvactors.storage.guarded import GuardedBackend, StoreClears
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from kvactors.testing.store_contract import key, never
from tests.storage.helpers import PRINT, cached_config, serve

OK, MISS, UNAVAILABLE, LATE = Outcome.OK, Outcome.MISS, Outcome.UNAVAILABLE, Outcome.LATE


class PanicException(BaseException):
    """As bindings of other languages raise it."""


class Unprintable(Exception):
    """An error of foreign code that raises when it is printed."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


RAISED = (
    ValueError("no"),
    asyncio.CancelledError(),
    PanicException("panicked"),
    StoreError("down"),
    Unprintable(),
)
READS = (
    ReadReport(b"", []),
    ReadReport(b"\0" * 3, []),
    ReadReport(b"\0\xff", []),
    ReadReport([0, 0], []),
    ReadReport(None, []),
    ReadReport("\0\0", []),
    ReadReport(b"\0\0", [5]),
    ReadReport(b"\0\0", "names"),
    ReadReport(b"\0\0", [b"short"]),
    None,
    7,
    b"\0\0",
)
COUNTS = (-3, "7", 3, 2**70, 1.5, object(), [])


def raising(error):
    def call(*_args, **_keywords):
        raise error

    async def later(*_args, **_keywords):
        raise error

    return call, later


async def answer(value):
    return value


def checked(block_bytes=16):
    inner = MemoryBackend(bytes(32), block_bytes)
    return inner, GuardedBackend(inner, 60.0)


def views(count, size=16):
    return [memoryview(bytearray(size)) for _ in range(count)]


@pytest.mark.parametrize("report", READS)
async def test_read_reports_that_do_not_fit_are_no_hits(report):
    """Nor are write reports stored blocks."""
    inner, store = checked()
    inner.read = lambda *_: answer(report)
    made = WriteReport(*report) if isinstance(report, ReadReport) else report
    inner.write = lambda *_: answer(made)
    for call in (store.read, store.write):
        before = store.faults
        outcomes, left = await call([key(1), key(2)], views(2), never)
        assert len(outcomes) == 2
        assert all(isinstance(one, bytes) and len(one) == 32 for one in left)
        if not (isinstance(report, ReadReport) and report.outcomes == b"\0\0"):
            assert UNAVAILABLE in outcomes
        assert store.faults > before
    assert store.statistics().faults == store.faults


@pytest.mark.parametrize(
    "count", COUNTS, ids=lambda count: "an object" if type(count) is object else str(count)
)
async def test_counts_out_of_range_are_nothing_found(count):
    inner, store = checked()
    inner.probe = lambda _: count
    assert store.probe([key(1), key(2)]) == 0
    inner.ask = lambda *_: answer(count)
    assert await store.ask([key(1), key(2)], never) == 0
    inner.count = lambda: count
    assert store.count() == (3 if count == 3 else 0)
    assert store.faults == (2 if count == 3 else 3)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
async def test_nothing_that_a_back_end_raises_passes(error):
    inner, store = checked()
    now, later = raising(error)
    for name in ("probe", "keys", "holds", "take_removed", "acknowledge_removed", "statistics"):
        setattr(inner, name, now)
    for name in ("ask", "read", "write", "remove"):
        setattr(inner, name, later)
    assert store.probe([key(1)]) == 0
    assert store.keys() == store.take_removed() == []
    assert store.holds(key(1)) is False
    store.acknowledge_removed([key(1)])
    assert await store.ask([key(1)], never) == 0
    assert list((await store.read([key(1)], views(1), never)).outcomes) == [UNAVAILABLE]
    assert list((await store.write([key(1)], views(1), never)).outcomes) == [UNAVAILABLE]
    await store.remove([key(1)])
    assert store.statistics().faults >= 9
    inner.clear = later
    with pytest.raises(StoreError):
        await store.clear()
    for name in ("open", "attach"):
        setattr(inner, name, later)
    with pytest.raises(StoreError):
        await store.open()
    with pytest.raises(StoreError):
        await store.attach(Arena(1, 16))


async def test_our_own_cancellation_passes_and_a_leaked_one_does_not():
    inner, store = checked()
    begun = asyncio.get_running_loop().create_future()

    async def hang(*_):
        begun.set_result(None)
        await asyncio.get_running_loop().create_future()

    inner.read = hang
    reading = asyncio.create_task(store.read([key(1)], views(1), never))
    await begun
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert store.faults == 0

    async def leaks(*_):
        inner_task = asyncio.create_task(asyncio.sleep(60))
        inner_task.cancel()
        await inner_task

    inner.read = leaks
    assert list((await store.read([key(1)], views(1), never)).outcomes) == [UNAVAILABLE]
    assert store.faults == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["Ctrl-C", "exit"])
def test_the_end_of_the_process_passes(error):
    async def main():
        inner, store = checked()
        inner.probe = raising(error)[0]
        store.probe([key(1)])

    with pytest.raises(type(error)):
        asyncio.run(main())


@pytest.mark.parametrize("bad", ["raises", "answers -1"])
async def test_a_fault_counts_against_its_own_call_only(bad):
    """Four good calls and a bad one in flight at a time, more often than opens the circuit."""
    inner, store = checked()
    release = asyncio.Event()

    async def ask(keys, _expired):
        await release.wait()
        if len(keys) == 1 and bad == "raises":
            raise ValueError("no")
        return -1 if len(keys) == 1 else 1

    inner.ask = ask
    for number in range(1, 7):
        release.clear()
        flying = [asyncio.create_task(store.ask([key(1)] * n, never)) for n in (1, 2, 2, 2, 2)]
        await asyncio.sleep(0)
        release.set()
        assert [await one for one in flying] == [0, 1, 1, 1, 1]
        assert (store.faults, store.statistics().breaker) == (number, "closed")
    for _ in range(FAILURES):
        assert store.statistics().breaker == "closed"
        await store.ask([key(1)], never)
    assert store.statistics().breaker == "open"
    (failing,) = store.attempts.failing()
    assert "no look-up has worked" in failing.why


async def test_writes_that_fail_are_judged_apart_from_reads():
    inner, store = checked()
    await store.write([key(1)], views(1), never)

    async def fails(*_):
        raise PermissionError("no write access")

    real, inner.write = inner.write, fails
    for number in range(10):
        await store.write([key(2)], views(1), never)
        assert (await store.read([key(1)], views(1), never)).outcomes == bytes([OK])
        failing = [one.why for one in store.attempts.failing()]
        assert len(failing) == (number >= FAILURES - 1)
    assert "no write has worked" in failing[0]
    assert "no write access" in failing[0]
    inner.write = real
    assert store.statistics()[2:4] == (10, 1)
    assert (store.statistics().unavailable, store.faults) == (10, FAILURES)


# -- views


@pytest.mark.parametrize("wrong", ["empty", "short", "long", "gaps", "missing", "read-only"])
async def test_a_batch_with_a_view_that_holds_no_object_is_refused(wrong):
    """Its store is not called: it would move the memory behind the view."""
    inner, store = checked()
    good, memory = views(1), memoryview(bytearray(48))
    bad = {
        "empty": [memory[:0]],
        "short": [memory[:15]],
        "long": [memory[:17]],
        "gaps": [memory[:32:2]],
        "missing": [],
        "read-only": [memoryview(bytes(16))],
    }[wrong]
    inner.read = inner.write = lambda *_: pytest.fail("called")
    keys, refused = [key(1), key(2)], bytes([Outcome.REFUSED] * 2)
    assert await store.read(keys, good + bad, never) == (refused, [])
    if wrong != "read-only":
        assert await store.write(keys, good + bad, never) == (refused, [])
    assert (store.faults, store.statistics().breaker) == (0, "closed")


async def test_a_store_of_objects_of_another_size_is_an_error_at_the_start():
    with pytest.raises(StoreError, match="objects of 16 bytes, and the layout has blocks of 256"):
        async with kvactors.open(
            cached_config(backend="memory"), backend=MemoryBackend(bytes(32), 16)
        ):
            pass


# -- clears


async def test_writes_that_begin_during_a_clear_are_late_and_reads_find_nothing():
    inner, store = checked()
    await store.write([key(1)], views(1), never)
    gate = asyncio.get_running_loop().create_future()
    erase = inner.clear

    async def slow(generation=0):
        await gate
        await erase(generation)

    inner.clear = slow
    clearing = asyncio.create_task(store.clear())
    await asyncio.sleep(0)
    assert store.probe([key(1)]) == 0
    assert list((await store.read([key(1)], views(1), never)).outcomes) == [MISS]
    assert list((await store.write([key(2)], views(1), never)).outcomes) == [LATE]
    gate.set_result(None)
    await clearing
    assert inner.generation == 1
    assert list((await store.write([key(2)], views(1), never)).outcomes) == [OK]


async def test_a_read_that_a_clear_overtakes_finds_nothing():
    inner, store = checked()
    await store.write([key(1)], views(1), never)
    gate = asyncio.get_running_loop().create_future()
    load = inner.read

    async def slow(*args):
        report = await load(*args)
        await gate
        return report

    inner.read = slow
    reading = asyncio.create_task(store.read([key(1)], views(1), never))
    await asyncio.sleep(0)
    await store.clear()
    gate.set_result(None)
    assert list((await reading).outcomes) == [MISS]


# -- in a whole cache


def memory_for(config: Config) -> MemoryBackend:
    layout = make_layout(config.layout, 4)
    return MemoryBackend(layout.fingerprint, layout.block_bytes)


@pytest.mark.parametrize("call", ["read", "write"])
async def test_a_cache_serves_with_a_back_end_that_answers_falsely(call):
    inner = memory_for(cached_config(backend="memory"))

    async def garbage(_keys, views, *_):
        for view in views if call == "read" else ():
            view[:] = b"\xee" * len(view)
        return ReadReport(b"\0", [])

    async with kvactors.open(cached_config(backend="memory"), backend=inner) as cache:
        for seed in range(12):
            await serve(cache, seed)
        await cache.wait_idle()
        setattr(inner, call, garbage)
        for seed in (*range(12), *range(20, 30)):
            await serve(cache, seed)
        await cache.wait_idle()
        assert cache.statistics().store.faults >= 1
        assert cache.statistics().host.pinned == 0
        assert cache.statistics().supervisor.failures == 0
        assert cache.check() == []


@pytest.mark.parametrize("wrong", ["7", b"short", None])
def test_names_that_are_no_keys_are_left_out(wrong):
    inner, store = checked()
    inner.key_slices = lambda: iter([[key(1), wrong], [key(2)]])
    assert [*store.snapshot()] == [key(1), key(2)]
    assert store.faults == 1


@pytest.mark.parametrize("name", ["ask", "read", "write"])
async def test_while_a_call_does_not_return_no_other_one_begins(name, monkeypatch):
    clock, calls, release = [0.0], [], asyncio.Event()
    monkeypatch.setattr("kvactors.storage.guarded.now", lambda: clock[0])
    inner = MemoryBackend(bytes(32), 16)
    store = GuardedBackend(inner, 2.0)
    work = {
        "ask": lambda: store.ask([key(1)], never),
        "read": lambda: store.read([key(1)], views(1), never),
        "write": lambda: store.write([key(1)], views(1), never),
    }
    inner.probe = lambda keys: len(keys)

    async def hangs(*_arguments):
        calls.append(1)
        await release.wait()

    inner.ask = inner.read = inner.write = hangs
    hanging = asyncio.create_task(work[name]())
    while not calls:
        await asyncio.sleep(0)
    clock[0] = 1.5
    assert store.overdue() is None
    assert store.probe([key(1)]) == 1
    clock[0] = 2.5
    assert store.overdue() == (name, 0.0)
    assert store.probe([key(1)]) == 0
    assert await work["ask"]() == 0
    assert list((await work["read"]()).outcomes) == [UNAVAILABLE]
    assert list((await work["write"]()).outcomes) == [UNAVAILABLE]
    assert len(calls) == 1
    release.set()
    await hanging
    assert store.overdue() is None
    assert store.probe([key(1)]) == 1


def small(**storage) -> tuple[Config, MemoryBackend]:
    """A cache of two requests, and its store."""
    config = Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 4},
            "device": {"num_blocks": 4},
            "host": {"slots": 1, "transit_slots": 2},
            "storage": {"write_policy": "write_through", "timeout_s": 0.25, **storage},
        }
    )
    return config, memory_for(config)


async def hangs(*_arguments):
    await asyncio.Event().wait()


@pytest.mark.parametrize("call", ["ask", "read"])
def test_a_store_whose_calls_do_not_return_costs_time_once_and_is_named(call):
    """Requests that follow the first ones are served without the store, and at once."""

    async def main():
        config, inner = small()
        if call == "ask":
            inner.probe = lambda _: None
        else:
            inner.probe = lambda keys: len(keys)
        inner.is_complete = False  # only a query can tell which objects it has
        setattr(inner, call, hangs)
        seconds = []
        async with kvactors.open(config, backend=inner, inline_copies=True) as cache:
            loop = asyncio.get_running_loop()
            for number in range(6):
                begun = loop.time()
                lease = await cache.acquire(f"r{number}", [number % 3] * 13, deadline=1.0)
                await lease.wait_ready()
                await lease.finish(13)
                seconds.append(loop.time() - begun)
            health = cache.health()
        assert seconds[0] == pytest.approx(1.0, abs=0.1)  # the deadline of the request
        assert sum(seconds[1:]) < 0.3  # one save waits for slots, up to storage.timeout_s
        assert health.status == "degraded"
        assert ("store", f"a call of {call} does not return") in [
            (one.component, one.why) for one in health.reasons
        ]

    simulate(main, seed=1)


def test_a_store_that_does_not_answer_holds_finished_blocks_for_its_timeout_at_most():
    async def main():
        config, inner = small(fetch=False)
        inner.probe, inner.ask = lambda _: None, hangs
        async with kvactors.open(config, backend=inner, inline_copies=True) as cache:
            loop = asyncio.get_running_loop()
            await (await cache.acquire("first", [1] * 13)).finish(13)
            begun = loop.time()
            lease = await cache.acquire("second", [2] * 13, deadline=1.0)
            assert loop.time() - begun == pytest.approx(0.25, abs=0.1)
            await lease.finish()

    simulate(main, seed=1)


@pytest.mark.parametrize("wrong", [[None], ()])
async def test_parts_of_paths_are_whole_or_none(wrong):
    inner = MemoryBackend(bytes(32), 8)
    inner.keeps_lineages = True
    store, part = GuardedBackend(inner, 60.0), PathPart(bytes(32), bytes(32), b"1234")

    async def good(most: int) -> list:
        return [part]

    async def bad(most: int) -> object:
        return type(wrong)([part, *wrong])

    inner.next_paths = good
    assert (await store.next_paths(1), store.faults) == ([part], 0)
    inner.next_paths = bad
    assert (await store.next_paths(1), store.faults) == (None, 1)


# -- The order of clears and writes.


async def test_an_earlier_clear_does_not_end_a_later_one():
    clears = StoreClears()
    first = clears.clearing()
    await first.__aenter__()
    with pytest.raises(OSError, match="no"):
        async with clears.clearing():
            raise OSError("no")
    await first.__aexit__(None, None, None)
    assert clears.pending


# -- A whole store is listed in parts, between which it may change.


COUNT = 20_000


def key_of(number: int) -> bytes:
    return sha256(number.to_bytes(4, "little")).digest()


def held() -> tuple[MemoryBackend, GuardedBackend]:
    store = MemoryBackend(bytes(32), 8)
    store.catalog.admit([key_of(number) for number in range(COUNT)])
    return store, GuardedBackend(store, 1.0)


def test_a_page_lists_only_a_part_of_the_store():
    store, checked = held()
    store.keys = None  # is not used
    listed = checked.snapshot()
    next(listed)
    sizes = [len(part) for part in store.key_slices()]
    assert sum(sizes) == COUNT
    assert max(sizes) < COUNT / 50


def test_a_key_that_stays_is_listed_while_others_change():
    store, checked = held()
    found: set[bytes] = set()
    removed = 0
    for one in checked.snapshot():
        found.add(one)
        if len(found) % 100 == 0:
            store.catalog.remove([key_of(removed)])
            store.catalog.admit([key_of(COUNT + removed)])
            store.catalog.run([key_of(COUNT // 2)])
            removed += 1
    assert found >= {key_of(one) for one in range(removed, COUNT)}
    assert removed > 10


# -- A store whose circuit breaker is open: nothing is read, written or lost.


async def test_a_refused_write_evicts_nothing():
    """The circuit breaker is open."""
    store = GuardedBackend(MemoryBackend(PRINT, 16, 2), 60.0)
    assert (await store.write([key(1), key(2)], views(2), never)).outcomes == bytes([OK]) * 2
    for _ in range(FAILURES):
        store.attempts.writes.failed()
    report = await store.write([key(3), key(4)], views(2), never)
    assert report == (bytes([UNAVAILABLE]) * 2, [])
    assert sorted(store.keys()) == [key(1), key(2)]
    assert store.take_removed() == []
    assert (store.statistics().evicted, store.statistics().unavailable) == (0, 2)
