"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _structlog_as_imported() -> Iterator[None]:
    """`capture_logs` and commands configure structlog for the whole process, with streams that pytest closes after the test."""
    yield
    structlog.reset_defaults()
