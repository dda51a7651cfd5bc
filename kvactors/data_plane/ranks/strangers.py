"""Connections that a leader refused: counted by reason, logged once for each source."""

from __future__ import annotations

from collections import OrderedDict

from kvactors.actor.log import get_logger

log = get_logger()

SOURCES = 256
"""Sources remembered as logged. The one that was seen longest ago is dropped first."""


class Strangers:
    """counts: refused connections by kind. shown: the latest reasons of ranks that do not fit, for
    the error of `open`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.shown: list[str] = []
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refused(self, source: str, kind: str, reason: str, *, show: bool = False) -> None:
        """Count a refused connection. Log it unless its source was logged for this kind before."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if show and reason not in self.shown:
            self.shown = [*self.shown[-2:], reason]
        if (source, kind) in self._logged:
            self._logged.move_to_end((source, kind))
            return
        self._logged[source, kind] = None
        if len(self._logged) > SOURCES:
            self._logged.popitem(last=False)
        log.warning(
            "connection to the rank endpoint refused", source=source, kind=kind, reason=reason
        )
