"""Scheduler and worker in separate processes, and the Python of the next version of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.engines import stores
from tests.interop.engines.stores import offloading
from tests.interop.engines.test_offloading import PROMPTS, READ, SMALL, WHOLE, Alone, Start
from tests.interop.environments import InteropError

pytestmark = pytest.mark.engines


def test_scheduler_and_worker_in_separate_processes(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    extra = offloading(SMALL, tmp_path / "store")
    engine = start(extra, one_process=False, distributed_executor_backend="mp")
    for _ in range(2):
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
        assert engine.reset()
    again = engine.serve(PROMPTS, at_once=2)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE
    assert len(engine.children()) >= 2
    engine.kill()
    assert len(stores.regions()) == 1
    engine = start(extra, one_process=False, distributed_executor_backend="mp")
    assert len(stores.regions()) == 1
    first = engine.serve(PROMPTS, at_once=2)
    assert first.tokens == wanted
    assert min(first.cached) >= WHOLE
    engine.close()
    assert stores.regions() == []


@pytest.mark.parametrize("make", [offloading, stores.tier])
def test_the_next_version_of_vllm(
    start: Start, alone: Alone, tmp_path: Path, make: Callable[..., dict]
) -> None:
    (wanted,) = alone([PROMPTS])
    engine = start(make(SMALL, tmp_path / "store"), version="0.33.0")
    assert engine.opened["version"].startswith("0.33")
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    assert engine.reset()
    again = engine.serve(PROMPTS, at_once=2)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE
    assert engine.metrics()[READ] > 0
    engine.close()


@pytest.mark.engines_full
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cpu_bytes": 5}, "unknown key 'cpu_bytes'"),
        ({"storage": {"backend": "file"}}, "storage.directory is needed"),
        ({"cpu_bytes_to_use": 1000}, "holds no chunk of 65536 bytes"),
    ],
)
def test_a_bad_setting_is_named_at_start(start: Start, change: dict, error: str) -> None:
    with pytest.raises(InteropError, match=error):
        start(offloading(SMALL) | change)
