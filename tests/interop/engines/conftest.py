"""Fixtures of the tests inside engines."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK, SHARED
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import Prompt, Tokens, VllmEngine, VllmHost
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Environments:
    """The engines' environments."""
    return Environments(Path(request.config.getoption("--interop") or "."))


@pytest.fixture(scope="session")
def hosts(
    environments: Environments, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str | None], VllmHost]]:
    """Processes that have imported vLLM, by the `version` of `VllmHost`."""
    made: dict[str | None, VllmHost] = {}

    def host(version: str | None) -> VllmHost:
        if version not in made:
            made[version] = VllmHost(environments, tmp_path_factory.mktemp("host"), version)
        return made[version]

    yield host
    for each in made.values():
        each.close()


@pytest.fixture
def start(
    hosts: Callable[[str | None], VllmHost], tmp_path: Path
) -> Iterator[Callable[..., VllmEngine] | None]:
    """Starts vLLM engines with the tiny model. The arguments are those of `VllmEngine`, and the
    `version` of `VllmHost`."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    model = write_model(tmp_path / "model")
    made: list[VllmEngine] = []
    logs = itertools.count()

    def start_one(
        extra: dict[str, Any] | None = None, *, version: str | None = None, **options: Any
    ) -> VllmEngine:
        log = tmp_path / f"engine-{next(logs)}.log"
        made.append(VllmEngine(hosts(version), model, log, extra, **options))
        return made[-1]

    try:
        yield start_one
    finally:
        for engine in made:
            engine.discard()


@pytest.fixture
def alone(start: Callable[..., VllmEngine]) -> Callable[..., list[Tokens]]:
    """The tokens that vLLM samples without a connector, for rounds of prompts. `settings` are those
    of `VllmEngine`. The tests of a session share the answers, as they depend on the machine only.
    """

    def sample(
        rounds: Sequence[Sequence[Prompt]], max_tokens: int = 8, **settings: Any
    ) -> list[Tokens]:
        question = json.dumps([list(rounds), max_tokens, sorted(settings.items())])
        name = hashlib.sha256(question.encode()).hexdigest()[:16]
        known = Path(os.environ[SHARED]) / f"tokens-{name}.json"
        if not known.is_file():
            engine = start(**settings)
            served = [engine.serve(prompts, max_tokens=max_tokens).tokens for prompts in rounds]
            engine.close()
            known.write_text(json.dumps(served))
        return list(json.loads(known.read_text()))

    return sample
