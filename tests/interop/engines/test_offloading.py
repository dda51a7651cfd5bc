"""kvactors as vLLM's host tier and storage, and below vLLM's own host tier: the tokens are those of
vLLM alone, which is tested first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.consumers.base import wait_until
from tests.interop.engines import stores
from tests.interop.engines.stores import ADAPTERS, offloading
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import SERVE, Served, Tokens, VllmEngine, prompts
from tests.interop.environments import InteropError

pytestmark = pytest.mark.engines

Start = Callable[..., VllmEngine]
Alone = Callable[..., list[Tokens]]

WHOLE = 288
"""Tokens of a prompt of 320 that must come from a cache, at least: all but the last block's."""
PROMPTS = prompts(6)
"""51 chunks together: more than the device holds, and more than a small host tier."""
SMALL, LARGE = 32, 256
"""Chunks of host tiers."""
READ, WRITTEN = "vllm:kv_offload_tiering_read_bytes", "vllm:kv_offload_tiering_write_bytes"
FAILED = "vllm:kv_offload_tiering_promotion_job_failures"
HEALTHY = "vllm:kv_offload_healthy"
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "first_k_dense_replace": 4,
}
"""The configuration of a model with multi-head latent attention, beside that of the tiny model."""
NEWER = os.environ.get("INTEROP_VLLM", "0.33.0")
"""Version of vLLM's Python, over the compiled modules of the installed one."""


def test_greedy_tokens_depend_on_the_prompt_and_on_the_bytes_of_the_cache(start: Start) -> None:
    """vLLM without a plug-in: the reference, and a check that the comparison can fail."""
    engine = start()
    first = engine.serve(PROMPTS)
    assert len({tuple(tokens or ()) for tokens in first.tokens}) == len(PROMPTS)
    assert engine.serve(PROMPTS).digest == first.digest
    assert engine.serve(prompts(6, seed=2)).digest != first.digest
    assert engine.opened["kvactors"] == []
    one = engine.serve(PROMPTS[:1])
    again = engine.serve(PROMPTS[:1])
    assert (again.digest, again.cached) == (one.digest, [288])
    engine.zero_device()
    control = engine.serve(PROMPTS[:1])
    assert control.cached == [288]
    assert control.digest != one.digest
    engine.close()


def test_hits_from_the_host_give_the_tokens_of_the_engine_alone(start: Start, alone: Alone) -> None:
    (wanted,) = alone([PROMPTS])
    engine = start(offloading(LARGE))
    assert "kvactors.integrations.vllm" in engine.opened["kvactors"]
    first = engine.serve(PROMPTS)
    assert (first.tokens, max(first.cached)) == (wanted, 64)
    for _ in range(2):
        assert engine.reset()
        again = engine.serve(PROMPTS)
        assert again.tokens == wanted
        assert min(again.cached) >= WHOLE
    hits = engine.metrics()["vllm:kv_offload_tiering_chunk_hits"]
    assert hits >= 2 * 6 * WHOLE // 32 - 2 * 10  # the common prefix is on the device at times
    # without the host tier's contents nothing is cached
    assert engine.reset(connector=True)
    forgotten = engine.serve(PROMPTS)
    assert forgotten.tokens == wanted
    assert max(forgotten.cached) <= 64
    # negative control: the bytes of the host tier decide
    assert stores.zero_host_memory() == 1
    assert engine.reset()
    control = engine.serve(PROMPTS)
    assert min(control.cached) >= WHOLE
    assert control.tokens != wanted
    engine.close()
    assert stores.regions() == []


@pytest.mark.parametrize(("one_process", "version"), [(True, NEWER), (False, None)])
def test_more_prompts_at_once_than_the_host_holds_are_stored_whole(
    start: Start, tmp_path: Path, version: str | None, one_process: bool
) -> None:
    """Also those of requests that finish with the step that computes them."""
    extra = offloading(64, tmp_path / "store", timeout_s=300.0, on_full_wait_s=300.0)
    wanted = prompts(24, 480, shared=0)
    settings = {"max_num_seqs": 24, "num_gpu_blocks_override": 400, "one_process": one_process}
    engine = start(extra, version=version, **settings)
    first = engine.serve(wanted, max_tokens=1)

    def saved() -> bool:
        engine.serve([[5] * 8], max_tokens=1)  # steps, without a chunk
        return engine.metrics().get(WRITTEN) == 24 * 15 * stores.CHUNK_BYTES

    wait_until("every chunk is saved", saved, SERVE)
    engine.close()
    again = start(extra, version=version, **settings)
    second = again.serve(wanted, max_tokens=1)
    assert second.tokens == first.tokens
    assert min(second.cached) >= 448
    again.close()


def test_hits_from_storage_after_an_orderly_end_and_after_kill_9(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    extra = offloading(SMALL, tmp_path / "store")
    engine = start(extra)
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    assert engine.reset()
    second = engine.serve(PROMPTS, at_once=2)
    assert second.tokens == wanted
    assert min(second.cached) >= WHOLE
    metrics = engine.metrics()
    assert metrics[READ] > 0
    assert metrics[WRITTEN] >= 40 * stores.CHUNK_BYTES
    assert metrics[HEALTHY] == 1
    engine.close()
    after_close = start(extra)
    first = after_close.serve(PROMPTS, at_once=2)
    assert first.tokens == wanted
    assert min(first.cached) >= WHOLE
    after_close.kill()
    assert len(stores.regions()) == 1
    after_kill = start(extra)
    assert len(stores.regions()) == 1
    first = after_kill.serve(PROMPTS, at_once=2)
    assert first.tokens == wanted
    assert min(first.cached) >= WHOLE
    after_kill.close()
    assert stores.regions() == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_new_weights_or_overrides_under_the_same_path_find_nothing(
    start: Start, tmp_path: Path, name: str
) -> None:
    adapter = ADAPTERS[name]
    extra = adapter.make(adapter.small, tmp_path / "store")

    def serve(extra: dict[str, Any] | None = extra, **settings: Any) -> Served:
        engine = start(extra, **settings)
        served = engine.serve(PROMPTS, at_once=2)
        engine.close()
        return served

    first = serve()
    write_model(tmp_path / "model", seed=6)
    other, right = serve(), serve(None)
    assert other.tokens == right.tokens != first.tokens
    assert max(other.cached) <= 64
    assert max(serve(hf_overrides={"rope_theta": 500.0}).cached) <= 64
    # the files of a model that is copied again have other times
    write_model(tmp_path / "model")
    again = serve()
    assert again.tokens == first.tokens
    assert min(again.cached) >= WHOLE


@pytest.mark.skipif("amx_tile" in Path("/proc/cpuinfo").read_text(), reason="AMX: vLLM computes it")
def test_latent_attention_that_cannot_compute_behind_cached_blocks_is_refused(
    start: Start, tmp_path: Path
) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | LATENT))
    with pytest.raises(InteropError, match="multi-head latent attention, and prefix caching is"):
        start(offloading(SMALL), load_format="dummy", block_size=16, num_gpu_blocks_override=64)


# -- scheduler and worker in separate processes


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


# -- `KVActorsTier`: storage below vLLM's own host tier


def test_the_next_version_of_vllm_with_a_tier_below_its_host_tier(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    engine = start(stores.tier(SMALL, tmp_path / "store"), version="0.33.0")
    assert engine.opened["version"].startswith("0.33")
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    assert engine.reset()
    again = engine.serve(PROMPTS, at_once=2)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE
    assert engine.metrics()[READ] > 0
    engine.close()


def test_hits_after_a_restart_and_misses_after_flipped_bits(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    (wanted,) = alone([PROMPTS])
    extra = stores.tier(2 * SMALL, tmp_path / "store")
    engine = start(extra)
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.close()
    engine = start(extra)
    first = engine.serve(PROMPTS, at_once=2)
    assert first.tokens == wanted
    assert min(first.cached) >= WHOLE
    engine.kill()
    stores.flip(tmp_path / "store")
    engine = start(extra)
    flipped = engine.serve(PROMPTS, at_once=2)
    assert flipped.tokens == wanted
    assert max(flipped.cached) <= 64
    assert engine.metrics()[FAILED] > 0
    assert "corrupt object" in engine.log.read_text(), "kvactors is silent in vLLM's log"
    assert engine.reset()
    again = engine.serve(PROMPTS, at_once=2)
    assert again.tokens == wanted
    assert min(again.cached) >= WHOLE
    engine.close()


@pytest.mark.engines_full
def test_flipped_bits_reach_the_tokens_through_a_tier_that_does_not_verify(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    """The negative control, with the file tier of vLLM."""
    (wanted,) = alone([PROMPTS])
    extra = stores.vllm_files(2 * SMALL, tmp_path / "store")
    engine = start(extra)
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.close()
    stores.flip(tmp_path / "store")
    engine = start(extra)
    flipped = engine.serve(PROMPTS, at_once=2)
    assert min(flipped.cached) >= WHOLE
    assert flipped.tokens != wanted
    engine.close()
