"""The state that the calls of an open cache share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvactors.arguments import check_names
from kvactors.client import Client
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.system import System


class OpenCache:
    """An open cache without its calls."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.config = system.config
        self.block_size = system.config.cache.block_size
        self.device: Any = system.device
        self._client = Client(system)
        self._leases = self._client.lease_numbers
        self._split_media = system.config.cache.split_media
        self._stated_to = 0  # the incarnation of the notifier that has had the whole state

    @property
    def namespace(self) -> str:
        """The namespace that requests are admitted under (`set_namespace`)."""
        return self.system.roots.namespace

    @property
    def sinks(self) -> dict[str, Sink]:
        """The flush sinks by name."""
        return self.system.sinks

    def _sink_names(self, sinks: Collection[str] | None) -> tuple[str, ...] | None:
        names = check_names("sinks", sinks)
        unknown = set(names or ()) - self.sinks.keys()
        if unknown:
            raise ValueError(
                f"there is no sink {min(unknown)!r} (sinks: {', '.join(self.sinks) or 'none'})"
            )
        return names
