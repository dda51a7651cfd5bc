"""The sinks of a `TierCache`, as an engine uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvactors.tier_cache.checks import checked_keys, checked_limit
from kvactors.tier_cache.paths import checked_path
from kvactors.tier_cache.sinks import TierSinks

PAUSE = 0.005
"""Seconds between two looks whether the owner has sent its state."""


class CacheSinks:
    """Paths of blocks for the indexes that kvactors informs. Calls come from any thread.

    Args:
        sinks: the sinks.
        run: calls a function on the event loop of the sinks. False if there is none.
        call: does something in the thread that owns the cache.
    """

    def __init__(
        self,
        sinks: TierSinks,
        run: Callable[..., bool],
        call: Callable[[Callable[[], object]], None],
    ) -> None:
        self._feed = sinks.feed
        self._service = sinks.service
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
            ValueError: a key is no bytes, the tokens do not fit, or another argument is of a wrong
                type.
        """
        named = checked_keys(keys)
        if parent is not None:
            checked_keys([parent])
        size = self._feed.block_size
        path = checked_path(named, tokens, size, parent, lora, salt, extra_keys)
        self._call(partial(self._feed.describe, path))

    def wait_flushed(self, limit: float) -> bool:
        """Wait until every sink that works has acknowledged the changes of the steps that have
        ended, `limit` seconds at most.

        After a failure of FlushNotifier the thread that owns the cache sends the state again: this
        call if it is the owner's, otherwise the owner's next call.

        Returns:
            Whether they have.

        Raises:
            ValueError: the limit is no finite number.
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
        """See `SinkService.flushed`."""
        answer: Future[bool | None] = Future()
        try:
            return self._run(self._service.ask, limit, answer) and answer.result(limit + 1.0)
        except TimeoutError:
            return False
