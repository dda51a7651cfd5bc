"""`KVActorsTier`: storage below vLLM's own host tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.engines import stores
from tests.interop.engines.test_offloading import FAILED, PROMPTS, SMALL, WHOLE, Alone, Start
from tests.interop.engines.vllm_engine import Served, VllmEngine

pytestmark = pytest.mark.engines

HOST = 2 * SMALL
"""Chunks of vLLM's host tier. It must hold the prompts that the engine has at once, twice."""


def serve(engine: VllmEngine) -> Served:
    return engine.serve(PROMPTS, at_once=2)


def test_hits_after_a_restart_and_misses_after_flipped_bits(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    extra = stores.tier(HOST, tmp_path / "store")
    engine = start(extra)
    assert serve(engine).tokens == wanted
    engine.close()
    engine = start(extra)
    first = serve(engine)
    assert first.tokens == wanted
    assert min(first.cached) >= WHOLE
    engine.kill()
    stores.flip(tmp_path / "store")
    engine = start(extra)
    flipped = serve(engine)
    assert flipped.tokens == wanted
    assert max(flipped.cached) <= 64
    assert engine.metrics()[FAILED] > 0
    assert "corrupt object" in engine.log.read_text(), "kvactors is silent in vLLM's log"
    assert engine.reset()
    again = serve(engine)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE
    engine.close()


@pytest.mark.engines_full
def test_flipped_bits_reach_the_tokens_through_a_tier_that_does_not_verify(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    """The negative control, with the file tier of vLLM."""
    (wanted,) = alone([PROMPTS])
    extra = stores.vllm_files(HOST, tmp_path / "store")
    engine = start(extra)
    assert serve(engine).tokens == wanted
    engine.close()
    stores.flip(tmp_path / "store")
    engine = start(extra)
    flipped = serve(engine)
    assert min(flipped.cached) >= WHOLE
    assert flipped.tokens != wanted
    engine.close()
