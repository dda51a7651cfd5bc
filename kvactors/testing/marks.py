"""Marks of the conformance suites."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def asyncio_marks() -> list[Any]:
    """pytest-asyncio's mark where it is installed, so that its strict mode, the default, runs the
    asynchronous tests of a suite."""
    if find_spec("pytest_asyncio") is None:
        return []
    import pytest

    return [pytest.mark.asyncio]
