"""vLLM without a plug-in: the reference of the other tests, and a check that the comparison can
fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interop.engines.vllm_engine import VllmEngine, prompts

pytestmark = pytest.mark.engines


def test_greedy_tokens_depend_on_the_prompt_and_on_nothing_else(
    start: Callable[..., VllmEngine],
) -> None:
    engine = start()
    wanted = prompts(6)
    first = engine.serve(wanted)
    assert len({tuple(tokens or ()) for tokens in first.tokens}) == len(wanted)
    assert engine.serve(wanted).digest == first.digest
    assert engine.serve(prompts(6, seed=2)).digest != first.digest
    assert engine.opened["kvactors"] == []
    engine.close()


def test_a_device_cache_of_zeros_changes_the_tokens(start: Callable[..., VllmEngine]) -> None:
    engine = start()
    wanted = prompts(1)
    first = engine.serve(wanted)
    again = engine.serve(wanted)
    assert (again.digest, again.cached) == (first.digest, [288])
    engine.zero_device()
    control = engine.serve(wanted)
    assert control.cached == [288]
    assert control.digest != first.digest
    engine.close()
