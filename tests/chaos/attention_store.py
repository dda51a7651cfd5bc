"""AttentionStore's service fails in every way under load: as device store and as index of one
cache, with requests of every identity."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from kvactors.actor.uncancelled import uncancelled
from kvactors.cache import KVCache
from kvactors.errors import StoreUnsupported
from kvactors.observe.statistics import residency
from kvactors.opening import open_cache
from kvactors.settings import Config
from kvactors.storage import attempts
from kvactors.testing.faults import Fault
from kvactors.types import Tier
from tests.chaos.load import Load, make_mix
from tests.chaos.record import Setting, Tally, reached
from tests.chaos.rest import BREAKER, at_rest, settings
from tests.flush_notifier.helpers import known, path_tokens
from tests.support import attentionstore_sdk as stand_in
from tests.support.announced import announceable
from tests.support.attentionstore_sdk import Service

PATIENCE = 30.0
"""Seconds in which health must show a failure, or its end."""

FAULTS: tuple[tuple[Fault, bool], ...] = (
    (Fault("store_down"), True),
    (Fault("store_hang", delay=0.3), False),
    (Fault("store_slow", delay=0.6), False),
    (Fault("store_small", amount=5), False),
    (Fault("store_refuse_block", amount=3), False),
    (Fault("store_count_low"), False),
    (Fault("store_count_invalid"), True),
    (Fault("object_lost", amount=1 << 30), False),
    (Fault("store_leak"), True),
    (Fault("store_lose_answers"), False),
)
"""Faults of the service, and whether health must show them."""


async def run(setting: Setting, tally: Tally) -> None:
    """Inject every fault, in a random order. After each the service works again."""
    mapping = settings(setting.folder)
    mapping["cache"]["model"] = f"m {setting.folder}"  # the service of this round alone
    mapping["storage"] = {
        "backend": "attention_store",
        "write_policy": "write_through",
        "timeout_s": 2.0,
    }
    mapping["flush"]["sinks"] = [
        {"kind": "attention_store", "tiers": ["device", "host"]},
        {"kind": "memory"},
    ]
    mapping["flush"]["timeout_s"] = 2.0
    mapping["attention_store"] = {
        "sdk": stand_in.__name__,
        "ready_interval_s": 0.05,
        "write_slice_blocks": 3,
    }
    attempts.PAUSE_S = BREAKER
    service = stand_in.service(mapping["cache"]["model"])
    faults = list(FAULTS)
    setting.rng.shuffle(faults)
    async with open_cache(Config.from_mapping(mapping)) as cache:
        assert cache.system.device_store is not None
        load = Load(
            cache,
            tally,
            setting.seed,
            mix=make_mix(scopes=0.4, media=0.3, cancelled=0.08),
            excused=(StoreUnsupported,),
        )
        try:
            async with load.running():
                for fault, visible in faults:
                    await one_fault(load, service, fault, setting, tally, visible=visible)
                if not await reached(lambda: tally.storage > 0, PATIENCE):
                    tally.complain("no block came from the store")
            await load.everything()
            await finish_two(cache)
            await at_rest(cache, tally)
            compare_index(cache, service, tally)
        finally:
            await service.recover(fault)


async def one_fault(
    load: Load, service: Service, fault: Fault, setting: Setting, tally: Tally, *, visible: bool
) -> None:
    """Requests are served during it, and health shows it and its end."""
    cache, served = load.cache, tally.finished
    await setting.moment(0.1, 0.5)
    tally.faults += 1
    await service.inject(fault)
    async with other_namespace(load):
        await setting.moment(0.05, 0.3)
    if visible and not await reached(lambda: cache.health().status == "degraded", PATIENCE):
        tally.complain(f"health does not show that the service fails: {fault.kind}")
    await setting.moment(0.1, 0.5)
    if not await reached(lambda: tally.finished > served, PATIENCE):
        tally.complain(f"no request was served while the service failed: {fault.kind}")
    await service.recover(fault)
    if not await reached(lambda: cache.health().status == "ok", PATIENCE):
        tally.complain(
            f"health shows a failure that is over: {fault.kind}: {cache.health().reasons}"
        )


@asynccontextmanager
async def other_namespace(load: Load) -> AsyncIterator[None]:
    """Requests of another namespace than the one the store was opened with, while the block
    runs."""
    before = load.cache.namespace
    try:
        await change_namespace(load, "weights-2")
        yield
    finally:
        await uncancelled(change_namespace(load, before))


async def change_namespace(load: Load, name: str) -> None:
    """Change the namespace. The load expects nothing of pins meanwhile."""
    with load.pins.changing():
        await load.cache.set_namespace(name)


async def finish_two(cache: KVCache) -> None:
    """Finish a request of the plain scope and one of another, whose blocks the index is compared
    with, whatever is left of those before."""
    for salt in (None, "last"):
        tokens = list(range(2 * cache.block_size + 1))
        async with await cache.acquire("last", tokens, salt=salt, wait_for_room=True) as lease:
            await lease.wait_ready()
            await lease.finish(len(tokens))


def compare_index(cache: KVCache, service: Service, tally: Tally) -> None:
    """The index must hold the blocks of finished requests that device and host hold and that tokens
    alone identify."""
    ledger, held = cache.system.notifier_actor.ledger, residency(cache.system)
    found = known(ledger) & (held[Tier.DEVICE] | held[Tier.HOST])
    view = cache.sinks["attention_store"].filter
    plain = [
        path_tokens(ledger, key)
        for keys in announceable(cache.system, view).values()
        for key in keys
    ]
    paths = {tuple(np.frombuffer(path, "<u4").tolist()) for path in plain}
    if not paths or len(paths) == len(found):
        tally.complain(
            "the round proves nothing: no block of the plain scope, or none of another, is "
            "resident at rest"
        )
    if differing := len(paths ^ service.resident):
        tally.complain(f"the index differs from device and host on {differing} blocks")
    if cache.health().status != "ok":
        tally.complain(f"at rest health is {cache.health()}")
