"""Damaged, full and missing stores below both adapters: vLLM computes the chunks that cannot be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import SHARED
from tests.interop.engines import stores
from tests.interop.engines.stores import ADAPTERS, Adapter
from tests.interop.engines.test_offloading import FAILED, LARGE, PROMPTS, WHOLE, Alone, Start

pytestmark = pytest.mark.engines_full


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param]


@pytest.fixture
def whole_store(start: Start, adapter: Adapter, tmp_path: Path) -> Path:
    """The store of an engine that served the prompts and was shut down. The tests of a session
    damage copies of one store."""
    folder = tmp_path / "store"
    if start is not None:
        made = Path(os.environ[SHARED]) / f"store-{adapter.make.__name__}"
        if not made.is_dir():
            engine = start(adapter.make(LARGE, folder))
            engine.serve(PROMPTS)
            engine.close()
            folder.rename(made)
        shutil.copytree(made, folder)
    return folder


def check_recovery(start: Start, wanted: object, extra: dict) -> tuple[dict[str, float], list[int]]:
    """Serve the prompts from a damaged store, twice: the second time from the repaired one. Returns
    metrics of the first time, and the tokens of each prompt that came from the store."""
    engine = start(extra)
    first = engine.serve(PROMPTS)
    assert first.tokens == wanted
    metrics = engine.metrics()
    engine.close()
    engine = start(extra)
    again = engine.serve(PROMPTS)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE, again.cached
    engine.close()
    return metrics, first.cached


@pytest.mark.parametrize("damage", [stores.flip, stores.cut, stores.delete])
def test_damaged_objects_are_computed_again_and_stored_again(
    start: Start, alone: Alone, adapter: Adapter, whole_store: Path, damage: Callable[[Path], None]
) -> None:
    (wanted,) = alone([PROMPTS])
    damage(whole_store)
    metrics, cached = check_recovery(start, wanted, adapter.make(LARGE, whole_store))
    assert min(cached) < WHOLE
    if damage is stores.flip:
        assert metrics[FAILED] > 0
    if damage is not stores.cut:  # some chunks are left
        assert max(cached) <= 64


def test_a_full_store_keeps_its_limit_and_gives_the_right_tokens(
    start: Start, alone: Alone, adapter: Adapter, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = tmp_path / "store"
    engine = start(adapter.make(adapter.small, store, capacity_blocks=8))
    for _ in range(3):
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
        assert engine.reset(connector=adapter.keeps_storage)
    engine.close()
    assert sum(path.stat().st_size for path in stores.slabs(store)) <= 16 * stores.CHUNK_BYTES


def test_a_full_file_system_gives_the_right_tokens(
    start: Start, alone: Alone, adapter: Adapter, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = stores.small_file_system(tmp_path / "small", mebibytes=3)
    engine = start(adapter.make(adapter.small, store, capacity_blocks=40, free_space_floor=0))
    (store / "other").write_bytes(bytes(stores.free_bytes(store)))
    for _ in range(3):
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
        assert engine.reset(connector=adapter.keeps_storage)
    engine.close()


def test_a_store_that_disappears_gives_the_right_tokens(
    start: Start, alone: Alone, adapter: Adapter, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = tmp_path / "store"
    engine = start(adapter.make(adapter.small, store))
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    shutil.rmtree(store)
    for _ in range(2):
        assert engine.reset(connector=adapter.keeps_storage)
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.close()
