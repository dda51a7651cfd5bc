"""Indexes that a `TierCache` informs: changes of the tiers and paths of blocks, on their way from
the owner's thread to FlushNotifier and its sinks on the event loop of another thread."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from kvactors.actor import ActorRef, ActorSpec, Group, InFlight, Supervisor
from kvactors.errors import ActorFailed, CacheClosed, ConfigError, KVActorsError
from kvactors.flush_notifier.actor import FlushNotifier, NoNotifier
from kvactors.flush_notifier.deliver import close_sink, open_sink
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathPart,
    PathsFound,
    Report,
    TierCleared,
    WaitFlushed,
)
from kvactors.flush_notifier.sinks import make_plain_sink
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.identity import CacheScope, RequestScope
from kvactors.settings.check import convert
from kvactors.settings.sinks import AnySinkConfig, AttentionStoreSinkConfig
from kvactors.settings.tables import FlushConfig
from kvactors.tier_cache.checks import checked_keys, checked_limit
from kvactors.types import Reason, Tier

if TYPE_CHECKING:
    from kvactors.tier_cache.settings import TierConfig

# -- the owner's side: changes and paths, and the state that they add up to


NAME_BYTES = 32
NAME_DOMAIN = b"kvactors.tiers.block.v1"


class DescribedBlock(NamedTuple):
    """The place of a block in its path.

    Attributes:
        tokens: its own, little-endian uint32.
    """

    parent: bytes
    tokens: bytes
    scope: RequestScope
    extra_key: bytes
    first: bool


def block_name(key: bytes) -> bytes:
    """The 32-byte name of a key for sinks: the key itself if it fits, else its SHA-256."""
    return key if len(key) == NAME_BYTES else sha256(NAME_DOMAIN + key).digest()


OUTBOX = 16_384
"""Messages at most that wait for the event loop. Beyond that all are dropped, and the whole state
is sent when the loop works again."""


class SinkFeed:
    """Turns changes into messages to FlushNotifier, and keeps the state that they add up to.

    Sinks are sent only blocks whose path an engine has described, below blocks that they have been
    sent, so what a sink has been sent is a tree at every moment. FlushNotifier's ledger sees to it.

    Attributes:
        resend: the state is to be sent again: FlushNotifier lost it, or messages were dropped.
        incarnation: the incarnation of FlushNotifier, from any thread.
        token_root: root hash of the scope for sinks that identify blocks by tokens, empty for none.
    """

    def __init__(
        self,
        tiers: Iterable[Tier],
        block_size: int,
        scope: CacheScope,
        fingerprint: bytes,
        num_slots: int,
    ) -> None:
        self.tiers = frozenset(tiers)
        self.block_size = block_size
        self.idle_limit = 4 * num_slots + 1024
        # An incarnation of FlushNotifier marks that the messages before it are the whole state.
        self.outbox: deque[Report | int] = deque()
        self.resend = False
        self.incarnation: Callable[[], int] = lambda: 0
        self._sent = 0  # the incarnation to which the whole state was sent
        self.wake: Callable[[], object] = lambda: None
        self.token_root = b""
        self._scope = scope
        self._fingerprint = fingerprint
        self._held: dict[bytes, Tier] = {}  # the tiers of each block
        self._paths: OrderedDict[bytes, DescribedBlock] = OrderedDict()

    def record(self, tier: Tier, stored: bool, keys: Sequence[bytes], reason: Reason) -> None:
        names = [block_name(key) for key in keys]
        packed, held = b"".join(names), self._held
        if stored:
            for name in names:
                held[name] = held.get(name, Tier(0)) | tier
            self.put(BlocksAdded(packed, tier, reason))
            self._name(names, self.put)
            return
        for name in names:
            if left := held.pop(name, Tier(0)) & ~tier:
                held[name] = left
            elif name in self._paths:
                self._paths.move_to_end(name)
        self.put(BlocksRemoved(packed, tier, reason))
        self._forget_paths()

    def describe(
        self,
        keys: Sequence[bytes],
        tokens: bytes,
        parent: bytes | None,
        scope: RequestScope,
        extra_keys: Mapping[int, bytes],
    ) -> None:
        """Consecutive blocks of a path. tokens: of all of them, little-endian uint32."""
        size = 4 * self.block_size
        above = (
            self._scope._replace(lora=scope.lora, salt=scope.salt).root(self._fingerprint)
            if parent is None
            else block_name(parent)
        )
        blocks: dict[bytes, DescribedBlock] = {}
        for i, key in enumerate(keys):
            name = block_name(key)
            own, first = tokens[i * size : (i + 1) * size], parent is None and i == 0
            blocks[name] = DescribedBlock(above, own, scope, extra_keys.get(i, b""), first)
            above = name
        new = [name for name in blocks if name in self._held and name not in self._paths]
        for name, block in blocks.items():
            if name not in self._held:
                self._paths.pop(name, None)
            self._paths.setdefault(name, block)
        self._forget_paths()
        self._name(new, self.put)

    def _forget_paths(self) -> None:
        """Keep the paths of all blocks that a tier holds, and those of `idle_limit` others."""
        while len(self._paths) > self.idle_limit + len(self._held):
            name, block = self._paths.popitem(last=False)
            if name in self._held:
                self._paths[name] = block

    def _name(self, names: Iterable[bytes], put: Callable[[Report], None]) -> None:
        """Send the paths of those blocks that a tier holds and that are described, in runs."""
        runs: list[list[tuple[bytes, DescribedBlock]]] = []
        last = b""
        for name in names:
            block = self._paths.get(name)
            if block is None:
                continue
            if runs and block.parent == last and block.scope == runs[-1][0][1].scope:
                runs[-1].append((name, block))
            else:
                runs.append([(name, block)])
            last = name
        if not runs:
            return
        parts = tuple(
            PathPart(
                run[0][1].parent,
                b"".join(name for name, _ in run),
                b"".join(block.tokens for _, block in run),
                run[0][1].scope,
                tuple((i, block.extra_key) for i, (_, block) in enumerate(run) if block.extra_key),
            )
            for run in runs
        )
        roots = frozenset(block.parent for run in runs for _, block in run if block.first)
        put(PathsFound(parts, roots))

    def put(self, message: Report) -> None:
        if len(self.outbox) >= OUTBOX:
            self.resend = True
        if not self.resend:
            self.outbox.append(message)

    def flush(self) -> None:
        incarnation = self.incarnation()
        if incarnation != self._sent:  # the ledger of a new incarnation is empty
            self.resend = True
        if self.resend and len(self.outbox) < OUTBOX:
            self._send_everything(incarnation)
        if self.outbox:
            self.wake()

    def _send_everything(self, incarnation: int) -> None:
        self.resend, self._sent = False, incarnation
        self.outbox.clear()
        for tier in self.tiers:
            self.outbox.append(TierCleared(tier, Reason.RESTART))
            if held := b"".join(name for name, tiers in self._held.items() if tier in tiers):
                self.outbox.append(BlocksAdded(held, tier, Reason.RESTART))
        self._name((name for name in self._paths if name in self._held), self.outbox.append)
        self.outbox.append(incarnation)


# -- the event loop's side


BOUND = 1024  # messages in FlushNotifier's channel


class SinkService:
    """Runs FlushNotifier. A `Service`: every method is called on the loop."""

    def __init__(self, feed: SinkFeed, sinks: Sequence[Sink]) -> None:
        self.feed = feed
        self._sinks = tuple(sinks)
        self._config = FlushConfig()
        self._epoch = time.time_ns() // 1_000_000
        self._stack = AsyncExitStack()
        self._supervisor = Supervisor(
            InFlight(), closed=lambda: CacheClosed("the cache is shut down")
        )
        self._notifier: ActorRef[Report] = self._supervisor.make_ref(FlushNotifier, BOUND)
        self._stated = 0  # the incarnation that has the whole state
        self._pump: asyncio.Task[None] | None = None
        feed.incarnation = self._running_incarnation

    async def open(self) -> None:
        spec = ActorSpec(
            FlushNotifier,
            self._make,
            self._notifier,
            lambda ref: NoNotifier(ref, block_size=self.feed.block_size, config=self._config),
        )
        try:
            for sink in self._sinks:
                self._stack.push_async_callback(close_sink, sink, self._config.timeout_s)
                await open_sink(sink)
            await self._stack.enter_async_context(
                self._supervisor.running(Group("notifier", (spec,)), drain=1.0)
            )
        except BaseException:
            await self._stack.aclose()
            raise
        self.take()

    def _make(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=self.feed.block_size,
            sinks=list(self._sinks),
            config=self._config,
            epoch=self._epoch,
            idle_limit=self.feed.idle_limit,
            token_root=self.feed.token_root,
        )

    @property
    def actor(self) -> Any:
        return self._supervisor.actor(FlushNotifier.ROLE)

    def _running_incarnation(self) -> int:
        """The incarnation of FlushNotifier that takes messages. After a failure the channel is
        emptied first: a state that was sent before that is lost."""
        return self._notifier.incarnation - self._notifier.failure_pending

    # -- messages

    def take(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        outbox = self.feed.outbox
        with suppress(KVActorsError):  # the system stops
            while outbox:
                with suppress(IndexError):  # the owner has dropped everything
                    message = outbox.popleft()
                    if not isinstance(message, int):
                        await self._notifier.tell(message)
                    elif message == self._notifier.incarnation:
                        self._stated = message

    def _has_state(self) -> bool:
        """Whether FlushNotifier has the whole state. If not, the owner's next step sends it."""
        return self._notifier.incarnation == self._stated and not self.feed.resend

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why sinks do not work. Read from any thread."""
        supervisor = self._supervisor
        if supervisor.failed is not None:
            return ("sinks: FlushNotifier has failed",)
        found = [
            f"sinks: FlushNotifier is switched off: {one.cause}"
            for one in list(supervisor.switched_off.values())
        ]
        with suppress(KeyError):
            sinks = self.actor.sinks.deliveries
            found += [f"sink {one.sink.name}: {one.last_error}" for one in sinks if one.failures]
        return tuple(found)

    async def flushed(self, limit: float) -> bool | None:
        """Whether every sink that works has acknowledged what was handed over, within `limit`
        seconds. None: the owner has to send the state again first."""
        until = asyncio.get_running_loop().time() + limit
        self.take()
        if self._pump is not None:
            await asyncio.wait([self._pump], timeout=limit)
        if not self._has_state():
            return None
        try:
            done = await self._notifier.ask(WaitFlushed(healthy=True), deadline=until)
        except ActorFailed:  # FlushNotifier restarts, unless it has failed for good
            return None if self._supervisor.failed is None else False
        except KVActorsError:
            return False
        return done if self._has_state() else None  # the answer may be that of an empty ledger

    def ask(self, limit: float, answer: Future[bool | None]) -> None:
        task = asyncio.ensure_future(self.flushed(limit))
        task.add_done_callback(
            lambda done: answer.set_result(False if done.cancelled() else done.result())
        )

    async def close(self, limit: float) -> None:
        """Send what is due, for half of `limit` at most, and close the sinks."""
        if limit > 0:
            await self.flushed(0.5 * limit)
        if self._pump is not None:
            self._pump.cancel()
        await self._stack.aclose()


# -- the public object, and sinks from settings


PAUSE = 0.005  # seconds between two looks whether the owner has sent its state


class CacheSinks:
    """Paths of blocks for the indexes that kvactors informs. Calls come from any thread."""

    def __init__(
        self,
        service: SinkService,
        run: Callable[..., bool],
        call: Callable[[Callable[[], object]], None],
    ) -> None:
        self.service, self._feed = service, service.feed
        self._run, self._call = run, call
        self._feed.wake = partial(run, service.take)

    def describe(
        self,
        keys: Sequence[bytes],
        tokens: Any,
        parent: bytes | None = None,
        *,
        lora: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Give the path of blocks, stored or not yet. A block is announced once its path is
        described and its parent has been announced.

        Args:
            keys: consecutive blocks of a path.
            tokens: their tokens, `tokens_per_block` each, in [0, 2**32).
            parent: the key before them, None if they begin their path.
            lora: the adapter of the requests that share the blocks.
            salt: their cache salt.
            extra_keys: (index in `keys`, extra key) of blocks with media.

        Raises:
            ValueError: the tokens do not fit, or an argument is of a wrong type.
        """
        keys, size = checked_keys(keys), self._feed.block_size
        if parent is not None:
            checked_keys([parent])
        try:
            packed = array("I", tokens)
            extra: dict[Any, Any] = dict(extra_keys)
        except (TypeError, OverflowError, ValueError) as error:
            raise ValueError(
                "tokens must be integers from 0 to 2**32 - 1, and extra keys pairs of an index and "
                f"bytes: {error}"
            ) from None
        if len(packed) != len(keys) * size:
            raise ValueError(f"{len(packed)} tokens of {len(keys)} blocks of {size} tokens")
        for i, extra_key in extra.items():
            if not isinstance(i, int) or not isinstance(extra_key, bytes) or not 0 <= i < len(keys):
                raise ValueError(f"({i!r}, {extra_key!r}) is no extra key of {len(keys)} blocks")
        for name, value in (("lora", lora), ("salt", salt)):
            if not isinstance(value, str | None):
                raise ValueError(f"{name} must be a string or None, not {value!r}")
        scope = RequestScope(lora, salt)
        self._call(partial(self._feed.describe, keys, packed.tobytes(), parent, scope, extra))

    def wait_flushed(self, limit: float) -> bool:
        """Wait until every sink that works has acknowledged the changes of the steps that have
        ended, `limit` seconds at most.

        After a failure of FlushNotifier the thread that owns the cache sends the state again: this
        call if it is the owner's, otherwise the owner's next call.
        """
        limit = checked_limit("limit", limit)
        until = time.monotonic() + limit
        while True:
            done = self._flushed(max(0.0, until - time.monotonic()))
            if done is not None:
                return done
            self._call(self._feed.flush)
            if time.monotonic() >= until:
                return False
            time.sleep(min(PAUSE, max(0.0, until - time.monotonic())))

    def _flushed(self, limit: float) -> bool | None:
        answer: Future[bool | None] = Future()
        try:
            return self._run(self.service.ask, limit, answer) and answer.result(limit + 1.0)
        except TimeoutError:
            return False


def make_sinks(config: TierConfig, given: Sequence[Sink]) -> SinkService:
    """The sinks of a config and those of a caller."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"sinks must be a list of Sink objects, not {given!r:.80}")
    for sink in given:
        if not isinstance(sink, Sink):
            raise ConfigError(f"sinks must be Sink objects, not {sink!r:.80}")
    if config.tokens_per_block < 1:
        raise ConfigError("tokens_per_block is needed with sinks: they are sent the tokens")
    sinks = [*(_from_table(table, config) for table in config.sinks), *given]
    if len({sink.name for sink in sinks}) < len(sinks):
        raise ConfigError("sinks need different names")
    tiers: set[Tier] = set()
    for sink in sinks:
        tiers |= _checked(sink, config)
    feed = SinkFeed(
        tiers,
        config.tokens_per_block,
        CacheScope(config.model, config.storage.namespace),
        config.fingerprint,
        config.num_slots,
    )
    return SinkService(feed, sinks)


def _from_table(table: Mapping[str, Any], config: TierConfig) -> Sink:
    kinds: Any = AnySinkConfig
    settings: AnySinkConfig = convert({"tiers": ("host", "storage"), **table}, kinds, "sinks")
    settings.check()
    if isinstance(settings, AttentionStoreSinkConfig):
        raise ConfigError(
            f"sink {settings.label!r}: AttentionStore's index finds blocks by the hashes that "
            "kvactors computes from tokens, and here the engine computes the hashes"
        )
    return make_plain_sink(settings, config.model, config.tokens_per_block)


def _checked(sink: Sink, config: TierConfig) -> set[Tier]:
    wanted = sink.filter
    tiers = {tier for tier in (Tier.HOST, Tier.STORAGE) if wanted.tiers & tier}
    if wanted.tiers & Tier.DEVICE:
        raise ConfigError(f"sink {sink.name!r}: the engine reports tier 'device' itself")
    if wanted.by_tokens or sink.by_tokens:
        raise ConfigError(
            f"sink {sink.name!r} identifies blocks by tokens alone, and an engine's keys may stand "
            "for more"
        )
    if wanted.node or wanted.at_finish:
        raise ConfigError(
            f"sink {sink.name!r}: granularity must be 'per_tier' and report_gains_at 'commit': the "
            "engine reports no device blocks and no ends of requests"
        )
    both = [name for name in config.events if Tier[name.upper()] in tiers]
    if both:
        raise ConfigError(
            f"tier {min(both)!r} is in events and in sink {sink.name!r}: an index that reads both "
            "would count its blocks twice. Name it in one of them"
        )
    return tiers
