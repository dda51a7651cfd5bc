"""Threads as FastDeploy uses them: calls under the scheduler's lock, a finish thread that writes
without it, and a control thread that resets without it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import anyio
import pytest

from kvactors.errors import DeadlineExceeded, DeviceError
from kvactors.integrations.fastdeploy.lower_tiers import RankCopies
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request
from tests.integrations.fastdeploy.invariants import check

LIMIT = 30.0
"""Seconds that a wait may take. It only bounds a hang."""

A = list(range(8))


class HeldCopies:
    """Copies for storage wait until the test lets them go on."""

    def __init__(self, monkeypatch) -> None:
        self.begun: SimpleQueue[int] = SimpleQueue()
        self.go: SimpleQueue[None] = SimpleQueue()
        copy = RankCopies.store

        def store(copies, blocks, slots):
            self.begun.put(len(blocks))
            self.go.get(timeout=LIMIT)
            return copy(copies, blocks, slots)

        monkeypatch.setattr(RankCopies, "store", store)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as found:
        yield found


@pytest.mark.parametrize("seed", range(4))
def test_finish_threads_write_while_the_scheduler_goes_on(engine, pool, seed):
    one = engine(gpu=6, cpu=2, file=True, options={"staging_slots": 2})
    scheduler = one.scheduler(chunk=8)
    ends = []
    scheduler.finisher = lambda request: ends.append(pool.submit(scheduler.finish_now, request))
    for number in range(25):
        prompt = [number % (3 + seed)] * (1 + number % 15)
        scheduler.add(Request(f"r{number}", prompt), max_tokens=1 + number % 5)
        scheduler.step()
    until = time.monotonic() + LIMIT
    while (scheduler.left() or scheduler.prefilling) and time.monotonic() < until:
        scheduler.step()
    assert not scheduler.left()
    assert not scheduler.prefilling
    for end in ends:
        end.result(LIMIT)
    assert scheduler.wrong == []
    assert scheduler.failures == []
    check(one.manager)
    assert one.available == 6
    found = one.manager.statistics()
    assert found.failed_blocks == 0
    assert found.written_blocks > 0


def test_calls_of_several_threads_take_turns(engine, pool, monkeypatch):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    held = HeldCopies(monkeypatch)
    eviction = pool.submit(one.manager.free_block_ids, 1)
    held.begun.get(timeout=LIMIT)
    allocation = pool.submit(one.manager.allocate_gpu_blocks, 3, "b")
    assert not allocation.done()
    held.go.put(None)
    eviction.result(LIMIT)
    assert allocation.result(LIMIT) == [1, 2, 3]
    monkeypatch.undo()
    one.manager.recycle_gpu_blocks([1, 2, 3], "b")
    assert pool.submit(one.match, Request("c", A)).result(LIMIT)[1] == 8
    one.free(Request("c", A))
    check(one.manager)


def test_a_thread_that_calls_again_stands_behind_those_that_wait(engine, pool, monkeypatch):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    held = HeldCopies(monkeypatch)

    def evict_and_allocate():
        one.manager.free_block_ids(2)
        return one.manager.allocate_gpu_blocks(1, "again")

    again = pool.submit(evict_and_allocate)
    held.begun.get(timeout=LIMIT)
    waiting = pool.submit(one.manager.allocate_gpu_blocks, 1, "waiting")
    while len(one.manager._line) < 2:
        time.sleep(0.001)
    held.go.put(None)
    assert waiting.result(LIMIT) < again.result(LIMIT)  # the lowest block goes first


def test_a_call_waits_for_another_one_no_longer_than_it_may_take(engine, pool, monkeypatch):
    times = {"timeout_s": 0.01, "open_timeout_s": 0.01, "close_timeout_s": 0.01}
    one = engine(gpu=4, cpu=2, attach=False, file=True)
    one.manager._turn_s = sum(times.values())
    one.manager.attach()
    one.serve("a", A)
    held = HeldCopies(monkeypatch)
    eviction = pool.submit(one.manager.free_block_ids, 1)
    held.begun.get(timeout=LIMIT)
    with pytest.raises(DeadlineExceeded, match=r"have not ended after 0\.03 s"):
        one.manager.allocate_gpu_blocks(1, "b")
    held.go.put(None)
    eviction.result(LIMIT)
    assert one.manager.allocate_gpu_blocks(3, "b") == [1, 2, 3]


def test_a_pause_resets_without_the_lock_while_a_request_finishes(engine, pool, monkeypatch):
    """FastDeploy's `_control_pause` does. Its scheduler and its finish thread go on during the reset."""
    one = engine(gpu=6, cpu=2, file=True)
    held = HeldCopies(monkeypatch)
    request, running = Request("a", A), Request("b", [7] * 8)
    one.prefill(request)
    one.prefill(running)
    write = pool.submit(one.manager.write_cache_to_storage, request)
    held.begun.get(timeout=LIMIT)
    pool.submit(one.manager.reset).result(LIMIT)
    one.manager.write_cache_to_storage(running)
    assert one.free_blocks == [2, 3, 4, 5], "blocks 0 and 1 are still written to storage"
    assert not one.manager.can_allocate_gpu_blocks(5)
    one.manager.update_cache_blocks(running, BLOCK_SIZE, 8)  # of before: not cached
    one.free(running)
    held.go.put(None)
    write.result(LIMIT)
    pool.submit(one.free, request).result(LIMIT)
    assert one.manager.can_allocate_gpu_blocks(6)
    monkeypatch.undo()
    again = Request("c", A)
    assert one.match(again)[1] in (4, 8), "no batch begins after a reset"
    assert not one.wrong(again, 4)
    check(one.manager)


def test_two_resets_during_the_writes_of_one_prefix(engine, pool, monkeypatch):
    """The blocks of both writes are free once, after the last of the two."""
    one = engine(gpu=6, file=True, options={"staging_slots": 1})
    held = HeldCopies(monkeypatch)
    requests = [Request(name, A) for name in "ab"]
    for request in requests:
        one.prefill(request)
    writes = [pool.submit(one.manager.write_cache_to_storage, request) for request in requests]
    held.begun.get(timeout=LIMIT)
    for _ in range(2):
        one.manager.reset()
    held.go.put(None)
    held.go.put(None)
    for write in writes:
        write.result(LIMIT)
    assert one.manager.can_allocate_gpu_blocks(6)
    check(one.manager)


def test_a_release_during_a_write_frees_the_blocks_after_it(engine, pool, monkeypatch):
    """Otherwise the next request's bytes would be stored under the hashes of this one."""
    one = engine(gpu=2, file=True)
    held = HeldCopies(monkeypatch)
    request = Request("a", A)
    one.prefill(request)
    write = pool.submit(one.manager.write_cache_to_storage, request)
    held.begun.get(timeout=LIMIT)
    one.free(request)
    assert not one.manager.can_allocate_gpu_blocks(1)
    held.go.put(None)
    write.result(LIMIT)
    assert one.manager.can_allocate_gpu_blocks(2)
    monkeypatch.undo()
    one.manager.reset()
    again = Request("b", A)
    assert one.match(again)[1] == 8
    assert not one.wrong(again, 8)


def test_a_write_that_begins_after_the_release_writes_nothing(engine, monkeypatch):
    one = engine(gpu=2, file=True)
    request = Request("a", A)
    one.prefill(request)
    one.free(request)
    one.manager.write_cache_to_storage(request)
    assert one.manager.statistics().written_blocks == 0


def test_a_store_that_hangs_does_not_keep_requests(engine, faults, monkeypatch):
    """FastDeploy waits for a write without limit."""
    monkeypatch.setattr("kvactors.integrations.fastdeploy.lower_tiers.MARGIN", 0.05)
    one = engine(gpu=4, file=True, options={"storage": {"timeout_s": 0.05}})

    async def hang(self):
        await anyio.sleep(0.5)

    monkeypatch.setattr(faults, "_fault", hang)
    one.serve("a", A)
    one.serve("b", A)
    assert one.manager.statistics().failed_blocks == 4
    assert one.available == 4
    check(one.manager)
    monkeypatch.undo()
    until = time.monotonic() + LIMIT
    while one.manager.statistics().written_blocks < 2:  # the call returns
        assert time.monotonic() < until, "nothing is written again"
        one.serve("c", A)


def test_writes_of_others_leave_the_counters_of_the_tiers_right(engine):
    one = engine(gpu=4, cpu=2, file=True)
    one.serve("a", A)
    one.serve("b", A)
    tiers = one.manager._cache.lower.tiers
    found = tiers.statistics()
    assert (found.saved, found.failed_saves) == (2, 0)
    assert not tiers.has_pending_work()


def test_a_close_during_a_write_ends_it(engine, pool, monkeypatch):
    one = engine(gpu=2, file=True)
    held = HeldCopies(monkeypatch)
    request = Request("a", A)
    one.prefill(request)
    write = pool.submit(one.manager.write_cache_to_storage, request)
    held.begun.get(timeout=LIMIT)
    one.manager.close()
    held.go.put(None)
    write.result(LIMIT)
    one.manager.close()
    one.free(request)
    assert one.available == 2


# -- copies that do not end


def hang(*_):
    raise DeviceError("a copy has not ended")


def test_a_copy_for_storage_that_does_not_end_stops_the_writes(engine, monkeypatch):
    one = engine(gpu=4, file=True)
    monkeypatch.setattr(RankCopies, "store", hang)
    one.serve("a", A)
    monkeypatch.undo()

    one.serve("b", list(range(50, 58)))
    found = one.manager.statistics()
    assert (found.written_blocks, found.failed_blocks) == (0, 4)
    assert one.available == 4
