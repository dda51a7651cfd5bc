"""Shared by the checks on a GPU: their error, their limit, and the settings of a small cache."""

from __future__ import annotations

from typing import Any

LIMIT = 60.0
"""Seconds that a check may take. Only a hang takes as long."""


class Wrong(Exception):
    """A check has failed."""


def ensure(good: object, text: str) -> None:
    """Wrong with a text unless something is true."""
    if not good:
        raise Wrong(text)


def settings(**more: Any) -> dict[str, Any]:
    """Settings of a small cache."""
    return {
        "cache": {"block_size": 16, "model": "checks"},
        "device": {"num_blocks": 6},
        "host": {"slots": 16},
        "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "dtype": "bfloat16"},
        **more,
    }
