"""The data parallel replica that an SGLang worker belongs to."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel


def replica_of(dp_rank: int) -> int:
    """The number of the data parallel replica: its own processes, or its part of one worker group.

    Args:
        dp_rank: of the worker within its group.
    """
    try:
        own = get_parallel().dp_rank
    except (AttributeError, RuntimeError, ValueError):
        own = None
    return dp_rank or own or 0
