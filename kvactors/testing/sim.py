"""Sim: one simulated run of a whole cache. A loop of virtual time, copies and a store that take
time, faults, and a trace of every message."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvactors.actor import ActorRef, Envelope
from kvactors.actor.clock import now
from kvactors.actor.instrument import Instrument, Turn
from kvactors.cache import KVCache
from kvactors.data_plane.local import LocalPlane
from kvactors.device import Device, layout_for
from kvactors.errors import ConfigError, DeadlineExceeded, KVActorsError
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.prefix_index.messages import Acquire
from kvactors.settings import Config
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.system import System
from kvactors.testing.fakes import SimBackend, SimExecutor, SimSink
from kvactors.testing.faults import latency
from kvactors.testing.loop import SimLoop, simulate
from kvactors.testing.plan import SimFaults
from kvactors.testing.trace import Trace

T = TypeVar("T")

STEPS = 200_000
"""Steps at one instant of virtual time after which a simulated run counts as a livelock."""

LAGS = {"copies": 0.001, "store": 0.004, "sink": 0.002}
"""Seconds that a copy, an access to the store and a delivery take on average."""

SMALL: dict[str, dict[str, Any]] = {
    "cache": {"block_size": 8, "default_deadline_s": 10.0},
    "device": {"num_blocks": 32},
    "layout": {"kind": "gqa", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
    "host": {"slots": 32, "transit_slots": 16},
    "storage": {"backend": "memory", "capacity_blocks": 256, "write_policy": "write_through"},
}
"""Settings under which a test soon meets eviction: blocks of 8 tokens, 32 of them on the device, 32
on the host, 256 stored."""


class Unclean(AssertionError):
    """A cache was not clean at the end of a test.

    Attributes:
        problems: each problem as text.
        requests: the requests whose leases were not ended.
    """

    def __init__(self, problems: list[str], requests: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.requests = requests


def small_config(given: Device | None = None, /, **tables: Mapping[str, Any]) -> Config:
    """The small settings, with tables of settings that replace their values:
    `small_config(device={"num_blocks": 8})`.

    Args:
        given: the device, whose layout, block size and number of blocks replace the small ones.
        tables: the tables.

    Raises:
        ConfigError: names the fault in the tables.
    """
    small: dict[str, dict[str, Any]] = dict(SMALL)
    if given is not None:
        small["cache"] = {**SMALL["cache"], "block_size": given.layout.block_size}
        small["device"], small["layout"] = {}, {}
    if tables.get("storage", {}).get("backend", "memory") != "memory":
        small["storage"] = {}
    data = {name: {**small.get(name, {}), **tables.get(name, {})} for name in {**small, **tables}}
    return Config.from_mapping(data)


async def check_at_rest(
    cache: KVCache, forgotten: list[str], held: HeldBlocks | None = None
) -> None:
    """Check a cache that is no longer used. forgotten: requests whose leases were dropped, as
    `watch_leases` recorded them."""
    problems = [f"the lease of {name!r} was dropped and never finished" for name in forgotten]
    try:
        problems += await problems_at_rest(cache)
    except KVActorsError as error:
        raise Unclean([*problems, f"the cache does not become idle: {error}"], []) from error
    requests = [*forgotten, *(lease.request_id for lease in cache.system.index_actor.leases)]
    if held is not None:
        held.check()
        problems += held.problems
        requests += held.requests
    if problems:
        raise Unclean(problems, requests)


def watch_leases(cache: KVCache) -> list[str]:
    """A list that grows by the request of every lease that is garbage-collected without having been
    ended."""
    forgotten: list[str] = []

    def note(number: int) -> None:
        lease = cache.system.index_actor.leases.get(number)
        forgotten.append("?" if lease is None else lease.request_id)

    cache._context.on_forgotten = note
    return forgotten


class Sim:
    """One run, decided by its seed alone. tables: settings in place of the small ones (see
    `small_config`).

    random: for the test's own draws, from the seed. loop: of the last `run`. trace: of that run.
    faults: of it, and the fakes.
    """

    def __init__(self, seed: int, **tables: Mapping[str, Any]) -> None:
        self.seed = seed
        self.tables = tables
        self.faults = SimFaults(seed)
        self._begin()

    def _begin(self) -> None:
        self.random = random.Random(f"test {self.seed}")  # noqa: S311  (a schedule, not a secret)
        self._lags = random.Random(f"lags {self.seed}")  # noqa: S311
        self.trace = Trace()
        self.loop: SimLoop | None = None

    def run(self, main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine function to its end on a loop of this seed. A second run begins from the
        beginning: it is the same.

        Raises what `main` raises, Deadlock and Livelock.
        """
        if self.loop is not None:
            self._begin()
            self.faults.reset()
        self.loop = SimLoop(self.seed, limit=STEPS)
        return simulate(lambda: main(*args), loop=self.loop)

    def config(self, given: Device | None = None, /, **tables: Mapping[str, Any]) -> Config:
        """The run's settings, with these in place of theirs (see `small_config`). ConfigError."""
        merged = {
            name: {**self.tables.get(name, {}), **tables.get(name, {})}
            for name in {**self.tables, **tables}
        }
        return small_config(given, **merged)

    @asynccontextmanager
    async def open(
        self,
        config: Config | None = None,
        device: Device | Mapping[str, Any] | None = None,
        *,
        checked: bool = True,
        **tables: Mapping[str, Any],
    ) -> AsyncIterator[KVCache]:
        """A cache whose copies, store and sink are simulated: they take virtual time drawn from the
        seed. The next cache of a run finds the blocks that the one before stored.

        Args:
            config: in place of the run's settings.
            device: the engine's device, as of `kvactors.open`, in host memory. Or the table of
                settings.
            checked: at the end of a block that raised nothing, faults are healed and the cache must
                become idle with no lease left, no violated invariant, and a sink whose view matches
                the tiers. No device block may have been written while no lease held it.
            tables: settings in place of the run's.

        Raises:
            Unclean: lists the violations.
        """
        if isinstance(device, Mapping):
            tables["device"], device = device, None
        cache = KVCache(system := self._system(config or self.config(device, **tables), device))
        forgotten, held = watch_leases(cache), HeldBlocks(system, self.faults.acquired)
        async with system.running():
            self.faults.begin(cache)
            try:
                yield cache
                await self.faults.heal()
                if checked:
                    await check_at_rest(cache, forgotten, held)
            except Exception as error:
                for problem in held.problems:
                    error.add_note(problem)
                raise
            finally:
                cache.close()
                await self.faults.heal()

    def _system(self, config: Config, device: Device | None) -> System:
        layout = layout_for(config, device)
        faults = self.faults
        stored = config.storage.backend != "none" and not config.flush.flush_only
        kept = faults.store
        if not stored:
            faults.store = None
        elif kept is None or (kept.digest, kept.block_bytes) != (
            layout.fingerprint,
            layout.block_bytes,
        ):
            lag = latency(self._lags, LAGS["store"])
            faults.store = SimBackend(
                layout.fingerprint, layout.block_bytes, config.storage.capacity_blocks or 0, lag
            )
        tiers = MemorySinkConfig(name="sim", tiers=("device", "host", "storage"))
        faults.sink = SimSink(
            MemorySink(tiers, config.cache.block_size), latency(self._lags, LAGS["sink"])
        )
        system = System(config, device, [faults.sink], faults.store, inline_copies=True)
        system.epoch = 1  # not the time of day
        plane = system.plane
        if not isinstance(plane, LocalPlane):
            raise ConfigError("simulated copies need a device of this process: ranks.count = 1")

        def make_engine(device: Device) -> SimExecutor:
            faults.copies = SimExecutor(device, plane.arena, latency(self._lags, LAGS["copies"]))
            return faults.copies

        plane.make_engine = make_engine
        if isinstance(plane.device, Device):
            plane.engine = make_engine(plane.device)
        self.trace.attach(system)
        return system


class HeldBlocks(Instrument):
    """Compares the bytes of each device block from the end of the lease that held it until the next
    request gets it: a forward pass that goes on after the end of its lease has changed them.
    """

    def __init__(self, system: System, on_acquire: Callable[[asyncio.Task[Any]], None]) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._system = system
        self._on_acquire = on_acquire
        self._last: dict[int, tuple[str, float]] = {}  # by block: its last request, and the end
        self._device: Any = None
        self._unheld: dict[int, bytes] = {}
        system.supervisor.instruments.add(self)

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        task = asyncio.current_task()
        if isinstance(envelope.message, Acquire) and task is not None:
            self._on_acquire(task)

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        if receiver is self._system.index:
            self._look()

    def check(self) -> None:
        """Compare every block that no lease holds."""
        self._compare(list(self._unheld))

    def _look(self) -> None:
        """A turn of PrefixIndex has ended."""
        device, index = self._system.plane.device, self._system.index_actor
        if device is not self._device:  # after a sleep it has other memory
            self._device, self._unheld = device, {}
        if getattr(device, "regions", None) is None or device.kind != "host":
            return
        held = dict.fromkeys(index.index.loading, "")
        for copy in index.copies.values():
            held.update(dict.fromkeys(copy.targets, ""))
        for lease in index.leases:
            held.update(dict.fromkeys(lease.path.table(), lease.request_id))
        self._compare([block for block in held if block in self._unheld])
        for block, name in held.items():
            self._unheld.pop(block, None)
            if name:
                self._last[block] = name, now()
        for block in range(device.num_blocks):
            if block not in held and block not in self._unheld:
                self._unheld[block] = self._bytes(block)

    def _compare(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._bytes(block) == self._unheld[block]:
                continue
            self._unheld[block] = self._bytes(block)
            name, ended = self._last.get(block, ("", 0.0))
            holder = f"that of {name!r} had it until {ended:.4f}" if name else "none had it before"
            self.problems.append(
                f"device block {block} was written while no lease held it ({holder}): end a lease "
                "after the pass that writes its blocks, or record the pass"
            )
            if name:
                self.requests.append(name)

    def _bytes(self, block: int) -> bytes:
        pieces = zip(self._device.regions.tolist(), self._device.piece_bytes.tolist(), strict=True)
        return b"".join(ctypes.string_at(start + block * size, size) for start, size in pieces)


# -- a cache at rest


async def problems_at_rest(cache: KVCache, deadline: float = 30.0) -> list[str]:
    """Wait until a cache without requests is idle and its sinks are up to date, then check it: one
    text per problem, see `left_over`. An idle cache's invariants include that every sink's view
    equals the tiers."""
    at = now() + deadline
    try:
        await cache.wait_flushed(deadline)
        while cache.system.in_flight.count:
            # The timer of a pin, or a finaliser, has sent a message in the step of the answer.
            await cache.wait_flushed(max(at - now(), 1e-9))
    except DeadlineExceeded as error:
        return [f"the cache does not become idle: {error}"]
    return left_over(cache)


def left_over(cache: KVCache) -> list[str]:
    """One text per problem of a cache that is idle and has no requests: work in flight, leases that
    were not finished, waiting requests, violated invariants (see `KVCache.check`)."""
    system, core = cache.system, cache.system.index_actor
    problems = [f"the lease of {lease.request_id!r} was never finished" for lease in core.leases]
    if waiting := core.index_statistics().waiting + len(core.queue.held):
        problems.append(f"{waiting} requests still wait")
    if count := system.in_flight.count:
        problems.append(f"{count} messages or jobs are in flight")
    return problems + cache.check()
