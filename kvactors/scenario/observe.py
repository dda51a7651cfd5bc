"""Observers of a run: a recorder, a trace, an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeAlias

from kvactors.cache import KVCache

Observe: TypeAlias = Callable[[KVCache], AbstractAsyncContextManager[Any]]
"""Entered with the open cache of a run, and left before it closes."""


def unobserved(_: KVCache) -> AbstractAsyncContextManager[Any]:
    """Nothing looks at the run."""
    return nullcontext()
