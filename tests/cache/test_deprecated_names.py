"""Earlier names of the public API work for one release, with a warning. Threads have every call
of the cache and of leases."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from kvactors import types
from kvactors.actor.supervisor import SupervisorStatistics
from kvactors.cache import KVCache
from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import PLAIN, FlushTask
from kvactors.from_thread import FromThread, ThreadLease
from kvactors.lease import Lease
from kvactors.lineage import Lineage
from kvactors.types import Reason, Residency, Tier
from tests.support.cache import opened, prompt

LOOP_ONLY = {"close"}
"""Methods of the cache that other threads do not have."""


async def test_earlier_names_warn_where_they_are_called_and_work():
    async with opened() as cache:
        with pytest.warns(DeprecationWarning, match=r"acquire\(wait=\)") as warned:
            lease = await cache.acquire("r", prompt(1, 2), wait=False)
        assert warned[0].filename == __file__
        async with lease:
            with pytest.warns(DeprecationWarning, match=r"ready\(\).*wait_ready\(\)") as warned:
                await lease.ready()
            assert warned[0].filename == __file__
            with pytest.warns(DeprecationWarning, match="wait_layer"):
                assert await lease.layer_ready(0) == 0
            with pytest.warns(DeprecationWarning, match=r"keys\(\).*hashes\(\)"):
                assert lease.keys(0, 1) == lease.hashes(0, 1) != b""
        with pytest.warns(DeprecationWarning, match="wait_idle"):
            await cache.settled(5.0)
        with pytest.warns(DeprecationWarning, match="wait_flushed"):
            await cache.flush_settled(5.0, at_rest=False)
        with pytest.warns(DeprecationWarning, match="count_divergent_blocks"):
            assert cache.divergence() == 0
        with pytest.warns(DeprecationWarning, match="count_divergent_blocks_slices"):
            assert await cache.divergence_slices() == 0


async def test_earlier_names_work_from_threads():
    async with opened() as cache:

        def calls() -> None:
            with cache.from_thread.acquire("r", prompt(1, 2)) as lease:
                with pytest.warns(DeprecationWarning, match="wait_ready"):
                    lease.ready()
                with pytest.warns(DeprecationWarning, match="wait_layer"):
                    assert lease.layer_ready(0) == 0
                with pytest.warns(DeprecationWarning, match="hashes"):
                    assert lease.keys(0, 1) == lease.hashes(0, 1)
            with pytest.warns(DeprecationWarning, match="wait_idle"):
                cache.from_thread.settled(5.0)
            with pytest.warns(DeprecationWarning, match="wait_flushed"):
                cache.from_thread.flush_settled(5.0)

        await asyncio.to_thread(calls)


HASH = b"h" * 32
TASK = FlushTask(b"", 0, 1, HASH, HASH, Residency.GONE, Tier.HOST, Reason.CPU_EVICTION, epoch=1)
HELD = HeldBlock(HASH, HASH, 0, b"", 0, PLAIN)
LINEAGE = Lineage(HASH, b"tokens")
FAILURES = SupervisorStatistics(1, 2, "evictor: ValueError()")


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (lambda: TASK.keys, lambda: TASK.hashes),
        (lambda: HELD.key, lambda: HELD.hash),
        (lambda: LINEAGE.key(), lambda: LINEAGE.block_hash()),
        (lambda: FAILURES.deaths, lambda: FAILURES.failures),
        (lambda: FAILURES.last_death, lambda: FAILURES.last_failure),
        (lambda: types.KEY_BYTES, lambda: types.HASH_BYTES),
        (lambda: types.split_keys(bytes(64)), lambda: types.split_hashes(bytes(64))),
        (lambda: types.join_keys([b"a"]), lambda: types.join_hashes([b"a"])),
        (lambda: types.key_at(bytes(64), 1), lambda: types.hash_at(bytes(64), 1)),
        (lambda: types.count_keys(bytes(64)), lambda: types.count_hashes(bytes(64))),
    ],
)
def test_earlier_names_of_records_warn_where_they_are_read(earlier, now):
    with pytest.warns(DeprecationWarning, match="deprecated|has moved") as warned:
        assert earlier() == now()
    assert [one.filename for one in warned] == [__file__]


async def test_a_wrong_wait_is_refused_under_its_earlier_name():
    async with opened() as cache:
        with (
            pytest.warns(DeprecationWarning, match="wait_for_evictions"),
            pytest.raises(TypeError, match="wait must be a bool"),
        ):
            await cache.acquire("r", prompt(1, 2), wait=1)


def public(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(("kind", "threads"), [(KVCache, FromThread), (Lease, ThreadLease)])
def test_threads_have_every_call_with_the_same_arguments(kind, threads):
    there = public(threads)
    for name, value in public(kind).items():
        if name in LOOP_ONLY or not inspect.isfunction(value):
            continue
        assert name in there, f"{threads.__name__} has no {name}"
        ours = dict(inspect.signature(value).parameters)
        theirs = dict(inspect.signature(there[name]).parameters)
        if not inspect.iscoroutinefunction(inspect.unwrap(value)) and name != "abandon":
            assert theirs.pop("deadline").kind is inspect.Parameter.KEYWORD_ONLY
        elif "deadline" not in ours:
            theirs.pop("deadline", None)
        assert theirs == ours, f"{threads.__name__}.{name}"
