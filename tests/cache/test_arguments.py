"""No argument of a public call makes an actor fail: wrong ones are a TypeError or ValueError in the
caller that changes nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import structlog

import kvactors
from kvactors.cache import FromThread, KVCache
from kvactors.decode_batch import Step
from kvactors.errors import KVActorsError
from kvactors.from_thread import ThreadLease
from kvactors.lease import Lease
from tests.support.cache import BLOCK, prompt, serve, settings

nan, inf = float("nan"), float("inf")


class Odd:
    """Looks like a number, a sequence and a buffer, and is none."""

    def __index__(self):
        raise RuntimeError("no index")

    def __len__(self):
        return -1

    def __repr__(self):
        return "Odd()"


def kinds():
    """Wrong values by kind of argument, fresh on each call, since generators are used up."""
    odd, more = (object(), 1j, Decimal(4), Odd()), "x" * 70_000
    return {
        "int": [
            *(True, False, 1.0, nan, np.float32(2), "4", None, [1], np.array([1]), np.array(1)),
            *(b"1", {1}, -1, 2**63, 2**70, -(2**70), 10**30, Fraction(4), np.bool_(True), *odd),
        ],
        "seconds": [
            *(True, "1", [1], np.array([1.0]), nan, inf, -inf, 0, -1, 0.0, 10**400, 1e300),
            *(b"1", np.float64("nan"), np.bool_(True), *odd[:3]),
        ],
        "text": [
            *(5, 1.0, True, b"x", ["x"], "\ud800", more, np.array(["x"]), {"x"}, object(), Odd())
        ],
        "flag": [0, 1, None, "yes", 1.0, [], object(), np.int8(1), np.array([True])],
        "tokens": [
            *(None, "abc", b"abc", bytearray(b"abc"), 5, 1.0, [1.5], [True], [1, False], [[1]]),
            *([None], ["1"], {1, 2}, {1: 2}, (i for i in range(3)), [-1], [2**32], [Odd()], range),
            *(np.zeros((2, 2), int), np.zeros(3), np.array(["a"]), np.array([True]), np.array(5)),
            *(np.array([2**32]), np.zeros(3, ">i4"), np.zeros(3, complex), object(), Odd()),
        ],
        "prompt": [[], (), np.zeros(0, int)],
        "media": [
            *("abc", b"x", 5, None, {1: 2}, {(0, 1, "a")}, [1], [(0, 1)], [(0, 1, "a", "b")]),
            *([(0.0, 1, "a")], [("0", 1, "a")], [(0, True, "a")], [(-1, 1, "a")], [(0, 0, "a")]),
            *([(0, 10**9, "a")], [(0, 2**70, "a")], [(0, 1, None)], [(0, 1, 1.5)], [(0, 1, True)]),
            *([(0, 1, ["a"])], [(4, 1, "a"), (0, 1, "b")], [(0, 2, "a"), (1, 2, "b")], ["abc"]),
            *([(0, 1, 10**5000)], [(0, 1, "\ud800")], [(0, 1, more)], [(0, 1, more.encode())]),
            *(((0, 1, "a") for _ in range(1)), np.zeros((1, 3)), object()),
        ],
        "stream": [-1, 2**70, 0.5, True, "stream", b"stream", [], {}, object()],
        "event": [5, 0.5, True, "event", b"event", [], {}, object(), Odd()],
        "device": [5, "cuda", b"cuda", [], {}, object(), Odd()],
        "steps": [None, 5, "x", b"x", [5], [None], {1}, (x for x in "a"), [Step(5)], Step(5)],
        "leases": [None, 5, "x", b"x", [5], [None], {1}, (x for x in "a"), range(1), Odd()],
        "hints": [5, "pin", b"pin", {"pin": True}, ("pin",), object(), True, Odd()],
        "size": [0, -1, 2**40, 1.5, True, b"8 GiB", [8], "many", "1 B", "-8 GiB", object(), Odd()],
        "sink": [None, 5, b"memory", ["memory"], "nope", "", "\ud800", object()],
        "names": ["b", b"b", 5, ["b", "c"], [], [5], [None], {"b"}, {"b": 1}],
        "sinks": [
            *("memory", b"memory", 5, [5], [None], ["nope"], {"nope"}, [["memory"]]),
            *((x for x in "a"), object()),
        ],
    }


KINDS = {
    "int": "lora_id chunk_tokens num_blocks level layer num_tokens count computed_tokens "
    "output_tokens start stop",
    "seconds": "deadline",
    "text": "request_id salt lora namespace",
    "flag": "wait_for_evictions wait_for_room erase at_rest",
    "media": "extra_keys",
    "names": "request_ids",
    **{name: name for name in ("tokens", "event", "stream", "device", "steps", "leases", "hints")},
    **{name: name for name in ("sink", "sinks")},
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}
"""The kind of an argument, by its name."""
OTHERS = {("clear", "storage"): "flag"}
OTHERS |= {("set_quota", tier): "size" for tier in ("device", "host", "storage")}
NONE = ("deadline", "lora_id", "event", "stream", "chunk_tokens", "output_tokens")
"""Arguments that may be None where another kind of None is wrong."""
PROMPT = {"tokens": prompt(1, 2)}
VALID: dict[str, dict[str, object]] = {
    "acquire": {"request_id": "r", **PROMPT, "lora": "adapter"},
    **dict.fromkeys(("prefetch", "lookup", "lookup_slices", "unpin"), PROMPT),
    "step": {"steps": []},
    "record_pass": {"leases": []},
    "set_num_blocks": {"num_blocks": 8},
    "set_quota": {"salt": "s"},
    "set_namespace": {"namespace": "n"},
    "resync": {"sink": "memory"},
    "wait_layer": {"layer": 0},
    "extend": {"tokens": [1]},
    "next_chunk": {"num_tokens": 1},
    "reserve": {"num_tokens": 1},
    "truncate": {"num_tokens": 8},
    "fork_many": {"count": 1},
    "commit": {"computed_tokens": 0},
    "hashes": {"start": 0, "stop": 0},
    "pass_end": {"start": 0, "stop": 0},
}
"""Arguments that each method needs."""


def arguments_of(owner: type) -> Iterator[tuple[str, dict[str, str]]]:
    """Public methods with arguments, and the kind of each."""
    for method, member in inspect.getmembers(owner, inspect.isfunction):
        names = [*inspect.signature(member).parameters][1:]
        if names and not method.startswith("_"):
            yield method, {name: OTHERS.get((method, name)) or KIND[name] for name in names}


CALLS = {
    (owner, method): (VALID.get(method, {}), arguments)
    for owner in (KVCache, Lease, FromThread, ThreadLease)
    for method, arguments in arguments_of(owner)
}


def wrong_calls():
    """Every call with one wrong argument."""
    found = []
    for (owner, method), (_, arguments) in CALLS.items():
        for name, kind in arguments.items():
            for position, value in enumerate(kinds()[kind]):
                if value is not None or (
                    name not in NONE and (method, name) != ("finish", "computed_tokens")
                ):
                    found.append((owner, method, name, kind, position))
        if VALID.get(method, {}).get("tokens") is PROMPT["tokens"]:
            found += [(owner, method, "tokens", "prompt", position) for position in range(3)]
    return found


WRONG = wrong_calls()


def opened():
    host, sinks = {"slots": 4, "transit_slots": 4}, ({"kind": "memory"},)
    return kvactors.open(settings(device=64, host=host, sinks=sinks), inline_copies=True)


def abandon(result):
    """End the leases that a call has returned."""
    for lease in result if isinstance(result, tuple) else (result,):
        if isinstance(lease, Lease | ThreadLease):
            lease.abandon()


async def call(cache, owner, method, arguments):
    """Call a method, on a new lease if it is a lease's."""
    if owner is KVCache:
        result = getattr(cache, method)(**arguments)
        result = await result if inspect.isawaitable(result) else result
        abandon(result)
    elif owner is Lease:
        lease = await cache.acquire("mine", prompt(5, 2))
        try:
            result = getattr(lease, method)(**arguments)
            abandon(await result if inspect.isawaitable(result) else result)
        finally:
            lease.abandon()
    else:
        await asyncio.to_thread(call_in_thread, cache.from_thread, owner, method, arguments)


def call_in_thread(door, owner, method, arguments):
    lease = door.acquire("mine", prompt(5, 2)) if owner is ThreadLease else None
    try:
        result = getattr(lease or door, method)(**arguments)
        abandon(result)
    finally:
        if lease is not None:
            lease.abandon()


async def still_well(cache):
    await cache.resume()
    await cache.set_namespace("default")
    await cache.wait_idle()
    statistics = cache.statistics()
    assert statistics.supervisor.failures == 0
    prefix = statistics.prefix
    assert prefix.leases == prefix.waiting == prefix.nodes_referenced == 0
    assert prefix.blocks_free + prefix.evictable == prefix.blocks_total
    await serve(cache, "after", prompt(9, 2))
    await cache.wait_flushed()
    assert cache.check() == []
    assert cache.count_divergent_blocks() == 0


async def refuses(wrong):
    """Make wrong calls one after another."""
    async with opened() as cache:
        for owner, method, name, kind, position in wrong:
            value = kinds()[kind][position]
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                await call(cache, owner, method, {**CALLS[owner, method][0], name: value})
            assert not isinstance(caught.value, KVActorsError), (owner, method, name, value)
            assert isinstance(caught.value, (TypeError, ValueError)) or isinstance(
                value, (Odd, list)
            )
        assert cache.namespace == "default"
        await still_well(cache)


@pytest.mark.parametrize(
    ("owner", "method"), CALLS, ids=[f"{owner.__name__}-{method}" for owner, method in CALLS]
)
async def test_every_wrong_argument_is_refused(owner, method):
    await refuses([one for one in WRONG if one[:2] == (owner, method)])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"config": ["x.toml"]}, "config"),
        ({"config": 5}, "config"),
        ({"device": "cpu"}, "device"),
        ({"device": 5}, "device"),
        ({"sinks": "memory"}, "sinks"),
        ({"sinks": ["memory"]}, r"sinks\[0\]"),
        ({"sinks": 5}, "sinks"),
        ({"backend": "file"}, "backend"),
        ({"inline_copies": 1}, "inline_copies"),
        ({"inline_copies": None}, "inline_copies"),
        ({"clock": 5.0}, "clock"),
        ({"clock": lambda: None}, "clock must return a number"),
        ({"clock": lambda: True}, "clock must return a number"),
    ],
)
def test_open_refuses_wrong_arguments_before_it_is_entered(wrong, named):
    with pytest.raises(TypeError, match=named):
        kvactors.open(**wrong)


@pytest.mark.parametrize("reading", [nan, inf])
def test_open_refuses_a_clock_that_is_not_finite(reading):
    with pytest.raises(ValueError, match="clock must return a finite number"):
        kvactors.open(clock=lambda: reading)


@pytest.mark.parametrize("reading", [None, "now", nan, inf, 10**400, OSError("no time")])
async def test_a_clock_that_fails_later_stands_still(reading):
    """The cache serves on, with the same bytes and hits, and the first failure is logged."""
    found = [1.0]

    def clock():
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    config = settings(device=4, host={"slots": 4, "transit_slots": 4})
    opened = kvactors.open(config, clock=clock, inline_copies=True)
    with structlog.testing.capture_logs() as logs:
        async with opened as cache:
            await serve_sixty(cache, found, reading)
    assert [line["event"] for line in logs].count("clock failed") == 1


async def serve_sixty(cache, found, reading):
    """Serve requests while two readings of three fail."""
    for number in range(60):
        found[0] = reading if number % 3 else 1.0 + number
        async with await cache.acquire("r", prompt(number % 3, 2)) as lease:
            await lease.wait_ready()
            await lease.finish(2 * BLOCK, hints=kvactors.Hints(ttl=5.0))
    assert cache.statistics().prefix.device_hits > 0
    assert cache.check() == []


@pytest.mark.parametrize(
    ("field", "error", "values"),
    [
        ("priority", TypeError, [True, 0.5]),
        ("priority", ValueError, [3, -3]),
        ("ttl", TypeError, [False, "1"]),
        ("ttl", ValueError, [nan, inf, 0, -1.0]),
        ("pin", TypeError, [1, None]),
        ("session_ends", TypeError, [0]),
        ("returns_in", TypeError, [np.bool_(True)]),
        ("returns_in", ValueError, [nan]),
    ],
)
def test_a_wrong_hint_is_refused_by_name(field, error, values):
    for value in values:
        with pytest.raises(error, match=f"hints.{field}"):
            kvactors.Hints(**{field: value})
    with pytest.raises(ValueError, match="returns_in"):
        kvactors.Hints(session_ends=True, returns_in=1.0)
    assert kvactors.Hints(priority=-2, ttl=0.5, pin=True, returns_in=3).priority == -2


async def test_a_buffer_is_copied_before_the_call_returns_to_the_loop():
    """The index has the given tokens even if the caller changes its buffer while it waits."""
    async with opened() as cache:
        tokens = np.arange(2 * BLOCK, dtype=np.uint32)
        pending = asyncio.ensure_future(cache.acquire("a", tokens))
        await asyncio.sleep(0)
        tokens[:] = 7
        lease = await pending
        more = np.arange(100, 100 + BLOCK, dtype=np.uint32)
        pending = asyncio.ensure_future(lease.extend(more))
        await asyncio.sleep(0)
        more[:] = 7
        growing = list(range(200, 200 + BLOCK))
        await pending
        pending = asyncio.ensure_future(lease.extend(growing))
        await asyncio.sleep(0)
        growing += [-1, "x"]
        await pending
        assert lease.num_tokens == 4 * BLOCK
        assert len(lease.block_table) == 4
        cache.device.fill(list(lease.block_table), lease.hashes(0, 4))
        await lease.finish(4 * BLOCK)
        given_tokens = [*range(2 * BLOCK), *range(100, 100 + BLOCK), *range(200, 200 + BLOCK), 1]
        async with await cache.acquire("b", given_tokens) as again:
            assert again.cached_tokens == 4 * BLOCK
        await still_well(cache)
