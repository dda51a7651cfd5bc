"""Calls with nonsense: each is an error of the caller that names the argument, and changes nothing."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvactors import CacheClosed, ConfigError, LayoutError, TierCache, open_tiers
from kvactors.tier_cache import CopyWorker, Lookup, SlotMemory, open_storage, shared_memory
from kvactors.tier_cache.settings import TierConfig, TierStorage
from kvactors.tier_cache.storage_loop import LoopThread
from tests.tier_cache.helpers import BLOCK, KEYS, LIMIT, alone, make, payload, store

MEMORY: dict[str, Any] = {"backend": "memory", "capacity_blocks": 64}

BAD_KEYS: list[Any] = [
    None,
    5,
    "key",
    b"",
    ["key"],
    bytearray(b"key"),
    memoryview(b"key"),
    np.frombuffer(b"key", np.uint8),
    object(),
]
BAD_LISTS: list[Any] = [None, 5, "keys", b"keys", *([KEYS[9], key] for key in BAD_KEYS)]
BAD_PARENTS: list[Any] = [5, "ab", [KEYS[0]], [KEYS[0], "text"], [None, bytearray(b"key")], [1, 2]]


class Text(str):
    """A text that claims to be a key."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(KEYS[0])


def state(cache: TierCache) -> Any:
    return (cache.statistics(), cache.copies_in_flight(), cache.has_pending_work())


def refused(cache: TierCache, call: Callable[[], object], argument: str) -> None:
    """Check that a call raises ValueError with the argument's name, and changes nothing."""
    before = state(cache)
    with pytest.raises(ValueError, match=argument):
        call()
    assert state(cache) == before
    cache.check()


@pytest.fixture
def cache() -> Any:
    """All slots in use: one store and one load in flight, and two blocks that can be evicted."""
    found = make(4, storage=MEMORY, events=["host"])
    store(found, KEYS[:3])
    assert found.lookup(KEYS[0]) is Lookup.HIT
    found.prepare_load(KEYS[:1])
    found.prepare_store(KEYS[3:4])
    settle_storage(found)
    yield found
    found.shutdown()


def settle_storage(cache: TierCache) -> None:
    pause = threading.Event()
    while cache.statistics().saved < 3:
        cache.end_step()
        pause.wait(0.001)


@pytest.mark.parametrize("key", [*BAD_KEYS, Text("key")], ids=lambda key: type(key).__name__)
@pytest.mark.parametrize("call", ["lookup", "source"])
def test_a_key_that_is_none(cache: TierCache, key: Any, call: str) -> None:
    refused(cache, lambda: getattr(cache, call)(key), "a key must be bytes")


@pytest.mark.parametrize(
    "call", ["touch", "prepare_store", "complete_store", "prepare_load", "complete_load"]
)
def test_keys_that_are_none(cache: TierCache, call: str) -> None:
    for keys in BAD_LISTS:
        refused(cache, partial(getattr(cache, call), keys), "keys? must be")


def test_parents_that_are_none(cache: TierCache) -> None:
    """Both keys need a slot: nothing is evicted for a call that is refused."""
    for parents in BAD_PARENTS:
        refused(cache, partial(cache.prepare_store, KEYS[8:10], parents), "parents?")
    assert [cache.lookup(key) for key in KEYS[:3]] == [Lookup.HIT] * 3


@pytest.mark.parametrize("value", [None, "no", 2, [], b""], ids=repr)
def test_flags_that_are_none(cache: TierCache, value: Any) -> None:
    refused(cache, lambda: cache.complete_store(KEYS[3:4], value), "success")
    refused(cache, lambda: cache.complete_store(KEYS[3:4], success=value), "success")
    refused(cache, lambda: cache.reset(storage=value), "storage")
    assert cache.statistics().stored_objects == 3


def test_what_an_engine_has_at_hand_is_taken(cache: TierCache) -> None:
    """Generators, numpy's integers and truth values, and dictionaries."""
    cache.complete_load(key for key in KEYS[:1])
    cache.complete_store({KEYS[3]: "request"}, np.bool_(True))
    cache.end_step()
    found = cache.prepare_store(iter(KEYS[4:6]), iter([None, KEYS[4]]))  # type: ignore[arg-type]
    assert found.keys == tuple(KEYS[4:6])
    worker = CopyWorker(
        [np.zeros((np.int64(4), BLOCK), np.uint8)],
        cache.memory,
        threads=np.int32(2),  # type: ignore[arg-type]
    )
    worker.submit_store(np.int64(7), np.arange(2), np.array(found.slots, np.uint8))
    assert worker.wait([7], LIMIT)
    worker.shutdown()
    cache.complete_store(iter(found.keys), np.bool_(False))


def test_a_key_that_is_completed_twice_in_one_call_is_counted_once() -> None:
    cache = make(4)
    cache.prepare_store(KEYS[:2])
    cache.complete_store([KEYS[0], KEYS[0], KEYS[1]], success=False)
    assert cache.statistics().failed_stores == 2
    cache.shutdown()


def test_a_generator_that_raises_changes_nothing(cache: TierCache) -> None:
    def keys() -> Any:
        yield KEYS[9]
        raise RuntimeError("of the engine")

    before = state(cache)
    calls = (cache.touch, cache.prepare_store, cache.complete_store, cache.prepare_load)
    for call in (*calls, cache.complete_load):
        with pytest.raises(RuntimeError, match="of the engine"):
            call(keys())
    assert state(cache) == before
    cache.check()


def test_empty_batches_do_nothing(cache: TierCache) -> None:
    before = state(cache)
    cache.touch([])
    cache.complete_store([])
    cache.complete_load([])
    assert cache.prepare_load([]) == []
    assert cache.prepare_store([], []) == ((), (), (), (), ())
    assert state(cache) == before


CALLS: dict[str, Callable[[TierCache], object]] = {
    "lookup": lambda cache: cache.lookup(KEYS[0]),
    "prepare_store": lambda cache: cache.prepare_store(KEYS[:1]),
    "prepare_load": lambda cache: cache.prepare_load(KEYS[:1]),
    "copies_in_flight": lambda cache: cache.copies_in_flight(),
    "take_events": lambda cache: cache.take_events(),
    "start": lambda cache: cache.start(),
    "adopt": lambda cache: cache.adopt(),
}
QUIET: dict[str, Callable[[TierCache], object]] = {
    "touch": lambda cache: cache.touch(KEYS[:1]),
    "complete_store": lambda cache: cache.complete_store(KEYS[3:4]),
    "complete_load": lambda cache: cache.complete_load(KEYS[:1]),
    "end_step": lambda cache: cache.end_step(),
    "reset": lambda cache: cache.reset(storage=True),
    "statistics": lambda cache: cache.statistics(),
    "source": lambda cache: cache.source(KEYS[0]),
    "has_pending_work": lambda cache: cache.has_pending_work(),
    "shutdown": lambda cache: cache.shutdown(),
}


def test_calls_after_a_shutdown_with_copies_in_flight(cache: TierCache) -> None:
    cache.shutdown()
    for call in CALLS.values():
        with pytest.raises(CacheClosed):
            call(cache)
    for call in QUIET.values():
        call(cache)
    assert cache.health().status == "closed"
    for use in (lambda: cache.memory.view(0), cache.memory.hold):
        with pytest.raises(CacheClosed):
            use()
    with pytest.raises(CacheClosed):
        CopyWorker([np.zeros((4, BLOCK), np.uint8)], cache.memory)


@pytest.mark.parametrize("given", [False, True])
def test_a_cache_that_is_shut_down_before_its_worker_keeps_the_memory_of_copies(
    given: bool,
) -> None:
    """Threads copy to addresses: memory that was unmapped would end the process."""
    size = 64 << 10
    mapped = mmap.mmap(-1, 4 * size) if given else None
    cache = open_tiers({"model": "m", "block_bytes": size, "num_slots": 4}, memory=mapped)
    device = np.full((4, size), 7, np.uint8)
    worker = CopyWorker([device], cache.memory, inline_bytes=0)
    found = cache.prepare_store(KEYS[:4])
    worker.submit_store("before", range(4), found.slots)
    cache.shutdown()
    worker.submit_store("after", range(4), found.slots)
    worker.submit_load("load", range(4), found.slots)
    assert worker.wait(["before", "after", "load"], LIMIT)
    if mapped is not None:
        assert mapped[:] == b"\x07" * 4 * size
        with pytest.raises(BufferError):
            mapped.close()
    worker.shutdown()
    worker.shutdown()
    if mapped is not None:
        mapped.close()


# -- copies


@pytest.fixture
def worker() -> Any:
    memory = SlotMemory(4, BLOCK)
    found = CopyWorker([np.zeros((4, BLOCK), np.uint8)], memory)
    yield found
    found.shutdown()
    memory.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("offset", -1),
        ("offset", 0.0),
        ("offset", "0"),
        ("blocks_per_slot", 0),
        ("blocks_per_slot", 1.0),
        ("blocks_per_slot", True),
        ("blocks_per_slot", 2**63),
        ("threads", 0),
        ("threads", 65),
        ("threads", None),
        ("inline_bytes", -1),
        ("inline_bytes", 2.5),
    ],
)
def test_a_worker_with_options_out_of_range(option: str, value: Any) -> None:
    memory = SlotMemory(4, BLOCK)
    with pytest.raises((ValueError, TypeError, LayoutError), match=rf"{option}|do not fit|at -1"):
        CopyWorker([np.zeros((4, BLOCK), np.uint8)], memory, **{option: value})
    memory.close()


@pytest.mark.parametrize(
    "numbers",
    [[4], [-1], [2**63], [2**64], [0.0], ["0"], [None], [True], 0, [[0]], "0", None, [[0], [1, 2]]],
    ids=repr,
)
def test_blocks_and_slots_that_do_not_exist(worker: CopyWorker, numbers: Any) -> None:
    for blocks, slots in ((numbers, [0]), ([0], numbers)):
        for submit in (worker.submit_store, worker.submit_load):
            with pytest.raises(ValueError, match=r"block|slot|length"):
                submit("job", blocks, slots)
    with pytest.raises(ValueError, match="length"):
        worker.submit_store("job", [0, 1], [0])
    assert worker.in_flight == 0


@pytest.mark.parametrize("jobs", ["job", b"job", 5, None], ids=repr)
def test_jobs_that_are_no_collection_of_names(worker: CopyWorker, jobs: Any) -> None:
    """The letters of a name are not in flight, so a wait for them would end at once."""
    with pytest.raises(ValueError, match="jobs must be a collection of names"):
        worker.wait(jobs)


@pytest.mark.parametrize("limit", [math.nan, math.inf, None, "1", [1]], ids=repr)
def test_limits_that_are_no_times(worker: CopyWorker, limit: Any) -> None:
    worker.submit_store("job", [0], [0])
    with pytest.raises(ValueError, match="limit must be a number of seconds"):
        worker.wait(["job"], limit)
    tier = alone(**MEMORY)
    for call in (tier.drain, tier.close):
        with pytest.raises(ValueError, match="limit must be a number of seconds"):
            call(limit)
    assert tier.drain(-1.0)
    tier.close()
    cache = open_tiers(
        {
            "model": "m",
            "block_bytes": 8,
            "num_slots": 1,
            "tokens_per_block": 1,
            "sinks": [{"kind": "memory", "tiers": ["host"]}],
        }
    )
    assert cache.sinks is not None
    with pytest.raises(ValueError, match="limit must be a number of seconds"):
        cache.sinks.wait_flushed(limit)
    cache.shutdown()


def test_a_job_needs_a_name_that_can_be_found_again(worker: CopyWorker) -> None:
    with pytest.raises(ValueError, match="a job's name must be hashable"):
        worker.submit_store(["job"], [0], [0])  # type: ignore[arg-type]
    assert worker.in_flight == 0


# -- memory


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None, True, 2**70], ids=repr)
@pytest.mark.parametrize("name", ["num_slots", "block_bytes", "stride"])
def test_memory_of_sizes_that_do_not_exist(name: str, value: Any, tmp_path: Any) -> None:
    sizes = {"num_slots": 4, "block_bytes": 64, "stride": 64}
    if name == "stride" and value is None:
        return
    with pytest.raises(LayoutError, match=rf"{name}|bytes of memory"):
        SlotMemory(**{**sizes, name: value})
    if name != "stride":
        with pytest.raises((ConfigError, LayoutError), match=rf"{name}|bytes of memory"):
            open_tiers({"model": "m", "block_bytes": 64, "num_slots": 4} | {name: value})
    with pytest.raises((LayoutError, OSError), match=r"size|large"):
        shared_memory(tmp_path / "memory", value, create=True)
    assert list(tmp_path.iterdir()) == []


def test_more_memory_than_there_is() -> None:
    with pytest.raises(LayoutError, match="bytes of memory for host slots"):
        open_tiers({"model": "m", "block_bytes": 1 << 40, "num_slots": 1 << 20})


# -- configs and parts of a cache


def test_a_cache_checks_its_config_and_its_parts() -> None:
    good = TierConfig(model="m", block_bytes=64, num_slots=4)
    memory = SlotMemory(4, 64)
    for config in (
        TierConfig(model="", block_bytes=64, num_slots=4),
        TierConfig(model="m", block_bytes=64, num_slots=4, policy="newest"),
        TierConfig(model="m", block_bytes=64, num_slots=4, storage=TierStorage(backend="file")),
        TierConfig(model="m", block_bytes=64, num_slots="4"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            TierCache(config, memory)
    for wrong in (None, memoryview(bytearray(256)), SlotMemory(4, 32)):
        with pytest.raises(ConfigError, match=r"memory"):
            TierCache(good, wrong)  # type: ignore[arg-type]
    for sinks in (["index"], [None], 5, "sinks"):
        with pytest.raises(ConfigError, match="sink"):
            TierCache(good, memory, sinks=sinks)  # type: ignore[arg-type]
    other = open_storage({"model": "m", "block_bytes": 32, "num_slots": 1, "storage": MEMORY})
    with pytest.raises(ConfigError, match="storage"):
        TierCache(good, memory, storage=other)
    other.close()
    with pytest.raises(ConfigError, match="storage"):
        TierCache(good, memory, storage="store")  # type: ignore[arg-type]
    TierCache(good, memory).shutdown()


@pytest.mark.parametrize("config", [None, 5, "model = 'm'", ["model"], {5: 6}], ids=repr)
def test_settings_that_are_no_settings(config: Any) -> None:
    for opened in (open_tiers, open_storage):
        with pytest.raises(ConfigError):
            opened(config)


# -- storage alone


def test_storage_refuses_keys_and_views_that_are_none() -> None:
    tier = alone(**MEMORY)
    views = [memoryview(bytearray(BLOCK)) for _ in range(2)]
    for keys in BAD_LISTS:
        for submit in (tier.submit_store, tier.submit_load):
            with pytest.raises(ValueError, match=r"keys? must be"):
                submit("job", keys, views)
        for call in (tier.remove, tier.retain):
            with pytest.raises(ValueError, match=r"keys? must be"):
                call(keys)
        with pytest.raises(ValueError, match=r"keys? must be"):
            tier.submit_lookup("job", keys)
    for key in BAD_KEYS:
        with pytest.raises(ValueError, match="a key must be bytes"):
            tier.contains(key)
    for wrong in (None, 5, views[:1], [*views, *views]):
        with pytest.raises(ValueError, match="views"):
            tier.submit_store("job", KEYS[:2], wrong)  # type: ignore[arg-type]
    assert (tier.in_flight, tier.poll()) == (0, [])
    tier.close()


def test_lists_of_a_job_may_be_changed_after_the_call() -> None:
    tier = alone(**MEMORY)
    keys, views = KEYS[:4], [memoryview(bytearray(payload(key))) for key in KEYS[:4]]
    done = tier.submit_store("job", keys, views)
    keys.clear()
    views.clear()
    assert not done.cancel(), "the memory belongs to the job until its end"
    assert done.result(LIMIT).ok == (True,) * 4
    assert done.result().keys == tuple(KEYS[:4])
    tier.close()


def test_a_job_that_the_closing_loop_does_not_see_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop accepts calls between its last iteration and its end, and drops them."""
    tier = alone(**MEMORY)
    with monkeypatch.context() as lost:
        lost.setattr(LoopThread, "call", lambda *_: True)
        job = tier.submit_lookup(1, KEYS[:1])
    tier.close(1.0)
    assert job.result(LIMIT).ok == (False,)
    assert (tier.in_flight, len(tier.poll())) == (0, 1)
