"""Fixtures of the tests inside engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import VllmEngine
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback


@pytest.fixture
def environments(request: pytest.FixtureRequest) -> Environments:
    """The engines' environments."""
    return Environments(Path(request.config.getoption("--interop") or "."))


@pytest.fixture
def start(environments: Environments, tmp_path: Path) -> Iterator[Callable[..., VllmEngine] | None]:
    """Starts vLLM engines with the tiny model. The arguments are those of `VllmEngine`."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    model = write_model(tmp_path / "model")
    made: list[VllmEngine] = []

    def start_one(extra: dict[str, Any] | None = None, **options: Any) -> VllmEngine:
        log = tmp_path / f"engine-{len(made)}.log"
        made.append(VllmEngine(environments, model, log, extra, **options))
        return made[-1]

    try:
        yield start_one
    finally:
        for one in made:
            one.discard()
