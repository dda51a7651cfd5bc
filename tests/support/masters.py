"""A mooncake_master for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvactors.scenario.mooncake_master import Master


@contextmanager
def master(*flags: str) -> Iterator[Master]:
    """One that runs while the block does."""
    one = Master(*flags)
    one.start()
    try:
        yield one
    finally:
        one.kill()
