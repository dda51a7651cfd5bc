"""A real mooncake_master. Without the client's libraries the tests that use it are skipped."""

from __future__ import annotations

import pytest

from tests.support.masters import Master, free_port, master

try:
    import mooncake.store  # noqa: F401
except ImportError as error:
    pytest.skip(
        f"Mooncake's client cannot be loaded (Debian: libibverbs1, libnuma1): {error}",
        allow_module_level=True,
    )

__all__ = ["Master", "free_port", "master"]
