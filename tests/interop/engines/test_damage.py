"""kvactors as vLLM's host tier over damaged and full stores: vLLM computes what cannot be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.engines import stores
from tests.interop.engines.stores import offloading
from tests.interop.engines.test_offloading import (
    FAILED,
    LARGE,
    PROMPTS,
    SMALL,
    WHOLE,
    Alone,
    Start,
)

pytestmark = pytest.mark.engines_full


@pytest.fixture
def whole_store(start: Start, tmp_path: Path) -> Path:
    """The store of an engine that served the prompts and was shut down."""
    folder = tmp_path / "store"
    if start is not None:
        engine = start(offloading(LARGE, folder))
        engine.serve(PROMPTS)
        engine.close()
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
    start: Start, alone: Alone, whole_store: Path, damage: Callable[[Path], None]
) -> None:
    (wanted,) = alone([PROMPTS])
    damage(whole_store)
    metrics, cached = check_recovery(start, wanted, offloading(LARGE, whole_store))
    assert min(cached) < WHOLE
    if damage is stores.flip:
        assert metrics[FAILED] > 0
    if damage is not stores.cut:  # some chunks are left
        assert max(cached) <= 64


def test_a_full_store_keeps_its_limit_and_gives_the_right_tokens(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = tmp_path / "store"
    engine = start(offloading(SMALL, store, capacity_blocks=8))
    for _ in range(3):
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
        assert engine.reset()
    engine.close()
    assert sum(path.stat().st_size for path in stores.slabs(store)) <= 16 * stores.CHUNK_BYTES


def test_a_full_file_system_gives_the_right_tokens(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = stores.small_file_system(tmp_path / "small", mebibytes=3)
    engine = start(offloading(SMALL, store, capacity_blocks=40, free_space_floor=0))
    (store / "other").write_bytes(bytes(stores.free_bytes(store)))
    for _ in range(3):
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
        assert engine.reset()
    engine.close()


def test_a_store_that_disappears_gives_the_right_tokens(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    store = tmp_path / "store"
    engine = start(offloading(SMALL, store))
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    shutil.rmtree(store)
    for _ in range(2):
        assert engine.reset()
        assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.close()
