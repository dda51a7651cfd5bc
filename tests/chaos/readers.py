"""Readers of KV events in separate processes that are killed, stopped, cut off and partitioned. In
the end each equals the tiers, medium by medium."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from typing import Any

import anyio

from kvactors.cache import KVCache
from kvactors.testing.faults import LASTING, Fault, Kind
from kvactors.testing.plan import Injectable
from tests.chaos.proxy import Proxy, proxied
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import MEMORY, at_rest, loaded, named, settings, varied
from tests.support.child import Child, child
from tests.support.injectors import ProcessFaults
from tests.support.mirror import compare

Kinds = tuple[Kind, ...]

FAULTS: tuple[Kinds, ...] = (
    ("process_kill",),
    ("process_stop",),
    ("link_cut",),
    ("link_silent",),
    ("link_silent", "link_cut"),
)
"""Faults of a reader in turn: the first lasts for a while, and the next comes at its end."""


class Readers:
    """One reader, kept alive, behind a proxy for each of the publisher's sockets. lose: share of
    the live messages that it drops besides."""

    def __init__(self, stack: AsyncExitStack, events: Proxy, replay: Proxy, lose: float) -> None:
        self._stack = stack
        self._proxies = (events, replay)
        self._lose = str(lose)
        self.reader: Child | None = None

    async def start(self) -> None:
        """A new reader, without any state."""
        ends = [proxy.endpoint for proxy in self._proxies]
        self.reader = await self._stack.enter_async_context(
            child("-m", "tests.support.mirror", *ends, "--lose", self._lose)
        )
        await self.reader.receive()

    async def suffer(self, kinds: Kinds, setting: Setting) -> None:
        """Faults of the reader, or of one or both of its connections."""
        chosen = setting.rng.choice([self._proxies, self._proxies[:1], self._proxies[1:]])
        targets: tuple[Injectable, ...] = (self,) if kinds[0].startswith("process_") else chosen
        faults = [Fault(kind) for kind in kinds]
        for target, fault in itertools.product(targets, faults[:1]):
            await target.inject(fault)
        if faults[0].kind in LASTING and faults[0].kind != "process_kill":
            await setting.moment(0.2, 2.5)
        for target, fault in itertools.product(targets, faults[1:]):
            await target.inject(fault)
        for target in targets:
            await target.recover(faults[0])

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: process_kill, process_stop."""
        assert self.reader is not None
        await ProcessFaults(self.reader).inject(fault)

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`. A new reader comes in place of a killed one."""
        assert self.reader is not None
        if fault.kind == "process_kill":
            await self.start()
        else:
            await ProcessFaults(self.reader).recover(fault)


async def run(setting: Setting, tally: Tally) -> None:
    """Every fault at least once over two readers, at the same time."""
    try:
        import zmq  # noqa: F401
    except ImportError:
        tally.unavailable("pyzmq is not installed: pip install '/path/to/kvactors[kv-events]'")
        return
    window = setting.rng.choice([20, 10_000])
    sink = {
        "kind": "kv_events",
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "replay_window": window,
    }
    mapping = varied(settings(setting.folder / "store", MEMORY, sink, capacity_blocks=120), setting)
    faults = [*FAULTS] * setting.times(1, 2)
    setting.rng.shuffle(faults)
    async with loaded(mapping, setting, tally) as (cache, load), AsyncExitStack() as stack:
        pair = [await one_reader(cache, stack, lose) for lose in (0.0, 0.1)]
        async with load.running():
            async with anyio.create_task_group() as tasks:
                for number, readers in enumerate(pair):
                    tasks.start_soon(inject_all, readers, faults[number::2], setting, tally)
            await setting.moment(0.1, 0.5)
        await load.everything()
        await at_rest(cache, tally)
        for readers in pair:
            await compare_with(cache, readers, tally)


async def one_reader(cache: KVCache, stack: AsyncExitStack, lose: float) -> Readers:
    """A reader with its own proxies."""
    sink: Any = cache.sinks["kv_events"]
    events = await stack.enter_async_context(proxied(sink.endpoint))
    replay = await stack.enter_async_context(proxied(sink.replay_endpoint))
    readers = Readers(stack, events, replay, lose)
    await readers.start()
    return readers


async def inject_all(readers: Readers, faults: list[Kinds], setting: Setting, tally: Tally) -> None:
    """One fault after the other."""
    for kinds in faults:
        await setting.moment(0.05, 0.8)
        await readers.suffer(kinds, setting)
        tally.faults += 1


async def compare_with(cache: KVCache, readers: Readers, tally: Tally) -> None:
    """Each medium of a reader's mirror against its tier."""
    from kvactors.flush_notifier.sinks.kv_wire import MEDIA

    sink: Any = cache.sinks["kv_events"]
    truth = {
        MEDIA[sink.config.media][tier]: {int.from_bytes(key[-8:], "big") for key in keys}
        for tier, keys in named(cache).items()
    }
    assert readers.reader is not None
    said = await compare(readers.reader, sink.events.sequence, truth)
    if said["divergence"] or said["behind"]:
        tally.complain(
            f"a reader of KV events differs on {said['divergence']} blocks, {said['behind']} "
            f"batches behind: {said}"
        )
    if said["orphans"]:
        tally.complain(
            f"a reader of KV events was sent {said['orphans']} blocks without the block above "
            "them, or removals in this order"
        )
    for what in ("states", "gaps", "replayed", "connections"):
        tally.count(f"{what} of the readers' last processes", said[what])
