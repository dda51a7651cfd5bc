"""The lines of kvactors in the log of an engine, which configures its own loggers only."""

from __future__ import annotations

import logging


def log_to(theirs: logging.Logger) -> None:
    """Write kvactors' log lines to the handlers of an engine's logger, unless the application has a
    handler that they reach."""
    ours = logging.getLogger("kvactors")
    reached = [*ours.handlers, *(logging.root.handlers if ours.propagate else ())]
    if all(isinstance(handler, logging.NullHandler) for handler in reached):
        for handler in theirs.handlers:
            ours.addHandler(handler)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.getEffectiveLevel())
