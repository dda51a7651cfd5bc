"""Fixtures of the tests inside engines."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import SHARED
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import Prompt, Tokens, VllmEngine, VllmHost
from tests.interop.environments import Environments


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
) -> Iterator[Callable[..., VllmEngine]]:
    """Starts vLLM engines, with the tiny Llama unless `model` is another folder. The arguments are those of `VllmEngine`, and the
    `version` of `VllmHost`."""
    tiny = write_model(tmp_path / "model")
    logs = itertools.count()
    with ExitStack() as ends:

        def start_one(
            *extra: Any, version: str | None = None, model: Path = tiny, **options: Any
        ) -> VllmEngine:
            log = tmp_path / f"engine-{next(logs)}.log"
            engine = VllmEngine(hosts(version), model, log, *extra, **options)
            ends.callback(engine.discard)
            return engine

        yield start_one


@pytest.fixture
def alone(start: Callable[..., VllmEngine]) -> Callable[..., Tokens]:
    """The tokens that vLLM samples for prompts without a connector. `settings` are those of
    `VllmEngine`. The tests of a session share the answers, as they depend on the machine only."""

    def sample(wanted: Sequence[Prompt], max_tokens: int = 8, **settings: Any) -> Tokens:
        def serve() -> Tokens:
            engine = start(**settings)
            tokens = engine.serve(wanted, max_tokens=max_tokens).tokens
            engine.close()
            return tokens

        return known("vllm", [list(wanted), max_tokens, sorted(settings.items())], serve)

    return sample


def known(name: str, question: Any, answer: Callable[[], Any]) -> Any:
    """An answer that the tests of a session share."""
    digest = hashlib.sha256(json.dumps(question, default=str).encode()).hexdigest()[:16]
    file = Path(os.environ[SHARED]) / f"{name}-{digest}.json"
    if not file.is_file():
        file.write_text(json.dumps(answer()))
    return json.loads(file.read_text())
