"""Sinks of a `TierCache`, from settings."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from kvactors.errors import ConfigError
from kvactors.identity import CacheScope
from kvactors.settings.check import convert
from kvactors.tier_cache.checks import checked_keys, checked_limit
from kvactors.types import Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink
    from kvactors.tier_cache.settings import TierConfig
    from kvactors.tier_cache.sink_service import SinkService

BELOW = ("host", "storage")


def make_sinks(config: TierConfig, given: Sequence[Sink]) -> SinkService | None:
    """The sinks of a config and those of a caller, None for none."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"sinks must be a list of Sink objects, not {given!r:.80}")
    if not config.sinks and not given:
        return None
    from kvactors.flush_notifier.sinks.base import Sink
    from kvactors.tier_cache.paths import SinkFeed
    from kvactors.tier_cache.sink_service import SinkService

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
    from kvactors.flush_notifier.sinks import make_plain_sink
    from kvactors.settings.sinks import AnySinkConfig, AttentionStoreSinkConfig

    kinds: Any = AnySinkConfig
    settings: AnySinkConfig = convert({"tiers": BELOW, **table}, kinds, "sinks")
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


PAUSE = 0.005  # seconds between two looks whether the owner has sent its state


class CacheSinks:
    """Paths of blocks for the indexes that kvactors informs. Calls come from any thread."""

    def __init__(
        self,
        service: SinkService,
        run: Callable[..., bool],
        call: Callable[[Callable[[], object]], None],
    ) -> None:
        self._service = service
        self._feed = service.feed
        self._run = run
        self._call = call

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
        from kvactors.tier_cache.paths import DescribedPath

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
        path = DescribedPath(keys, packed.tobytes(), parent, lora, salt, extra)
        self._call(partial(self._feed.describe, path))

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
            return self._run(self._service.ask, limit, answer) and answer.result(limit + 1.0)
        except TimeoutError:
            return False
