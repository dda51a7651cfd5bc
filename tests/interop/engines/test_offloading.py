"""kvactors as vLLM's host tier and storage, and below vLLM's own host tier: the tokens are those of
vLLM alone, which is tested first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.engines import stores, tiny_qwen3_next, tiny_windows
from tests.interop.engines.stores import offloading
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import SERVE, Served, Tokens, VllmEngine, prompts
from tests.interop.processes import wait_until
from tests.support.valkey import valkey_server

pytestmark = pytest.mark.engines

Start = Callable[..., VllmEngine]
Alone = Callable[..., Tokens]

WHOLE = 288
"""Tokens of a prompt of 320 that must come from a cache, at least: all but the last block's."""
PROMPTS = prompts(6)
"""51 chunks together: more than the device holds, and more than a small host tier."""
SMALL, LARGE = 32, 256
"""Chunks of host tiers."""
READ, WRITTEN = "vllm:kv_offload_tiering_read_bytes", "vllm:kv_offload_tiering_write_bytes"
FAILED = "vllm:kv_offload_tiering_promotion_job_failures"
HEALTHY = "vllm:kv_offload_healthy"
NEWER = os.environ.get("INTEROP_VLLM", "0.33.0")
"""Version of vLLM's Python, over the compiled modules of the installed one."""


def test_greedy_tokens_depend_on_the_prompt_and_on_the_bytes_of_the_cache(start: Start) -> None:
    """vLLM without a plug-in: the reference, and a check that the comparison can fail."""
    engine = start()
    first = engine.serve(PROMPTS)
    assert len({tuple(tokens or ()) for tokens in first.tokens}) == len(PROMPTS)
    assert engine.serve(PROMPTS).tokens == first.tokens
    assert engine.serve(prompts(6, seed=2)).tokens != first.tokens
    assert engine.opened["kvactors"] == []
    one = engine.serve(PROMPTS[:1])
    again = engine.serve(PROMPTS[:1])
    assert (again.tokens, again.cached) == (one.tokens, [288])
    engine.zero_device()
    control = engine.serve(PROMPTS[:1])
    assert control.cached == [288]
    assert control.tokens != one.tokens
    engine.close()


def test_hits_from_the_host_give_the_tokens_of_the_engine_alone(start: Start, alone: Alone) -> None:
    wanted = alone(PROMPTS)
    engine = start(offloading(LARGE))
    assert "kvactors.integrations.vllm" in engine.opened["kvactors"]
    first = engine.serve(PROMPTS)
    assert (first.tokens, max(first.cached)) == (wanted, 64)
    for _ in range(2):
        engine.reset()
        comes_whole(engine, wanted)
    hits = engine.metrics()["vllm:kv_offload_tiering_chunk_hits"]
    assert hits >= 2 * 6 * WHOLE // 32 - 2 * 10  # the common prefix is on the device at times
    # without the host tier's contents nothing is cached
    engine.reset(connector=True)
    forgotten = engine.serve(PROMPTS)
    assert (forgotten.tokens, max(forgotten.cached) <= 64) == (wanted, True)
    # negative control: the bytes of the host tier decide
    engine.zero_host()
    engine.reset()
    control = engine.serve(PROMPTS)
    assert min(control.cached) >= WHOLE
    assert control.tokens != wanted
    engine.close()
    assert engine.regions() == []


def comes_whole(engine: VllmEngine, wanted: Tokens, at_once: int | None = None) -> None:
    """The prompts have the right tokens, and come from caches."""
    served = engine.serve(PROMPTS, at_once=at_once)
    assert served.tokens == wanted
    assert min(served.cached) >= WHOLE, served.cached


def test_more_prompts_at_once_than_the_host_holds_are_stored_whole(
    start: Start, tmp_path: Path
) -> None:
    """Also those of requests that finish with the step that computes them."""
    extra = offloading(64, tmp_path / "store", timeout_s=300.0, on_full_wait_s=300.0)
    wanted = prompts(24, 480, shared=0)
    settings = {"max_num_seqs": 24, "num_gpu_blocks_override": 400, "one_process": False}
    engine = start(extra, version=NEWER, **settings)
    first = engine.serve(wanted, max_tokens=1)

    def saved() -> bool:
        engine.serve([[5] * 8], max_tokens=1)  # steps, without a chunk
        return engine.metrics().get(WRITTEN) == 24 * 15 * stores.CHUNK_BYTES

    wait_until("every chunk is saved", saved, SERVE)
    engine.close()
    again = start(extra, version=NEWER, **settings)
    second = again.serve(wanted, max_tokens=1)
    assert second.tokens == first.tokens
    assert min(second.cached) >= 448
    again.close()


@pytest.mark.parametrize(("model", "blocks"), [("llama", 3), ("gemma3", 1), ("gpt_oss", 1)])
def test_layers_with_a_window_are_groups_of_chunks(
    start: Start, alone: Alone, tmp_path: Path, model: str, blocks: int
) -> None:
    settings = tiny_windows.settings(tmp_path / model, model)
    wanted = alone(PROMPTS, **settings)
    extra = offloading(2 * SMALL, tmp_path / "store") | {"blocks_per_chunk": blocks}
    groups_come_whole(lambda: start(extra, **settings), PROMPTS, wanted, 192)


def test_states_are_a_group_of_chunks(start: Start, tmp_path: Path) -> None:
    settings = tiny_qwen3_next.settings(tmp_path / "states")
    prompts_of_all = prompts(6, 2000, shared=700)

    engine = start(**settings)
    by_batch = [engine.serve(prompts_of_all, at_once=size).tokens for size in (None, 1, 2)]
    engine.close()
    # In bfloat16 the tokens of some prompts depend on the batch that they are computed in.
    firm = [
        at for at, (all_, one, two) in enumerate(zip(*by_batch, strict=True)) if all_ == one == two
    ]
    asked = [prompts_of_all[at] for at in firm[:4]]
    wanted = [by_batch[0][at] for at in firm[:4]]
    assert len({tuple(tokens or ()) for tokens in wanted}) == len(asked) >= 3
    extra = offloading(1024, tmp_path / "store")
    groups_come_whole(lambda: start(extra, **settings), asked, wanted, 3 * 544)


def groups_come_whole(
    opened: Callable[[], VllmEngine], asked: list[list[int]], wanted: Tokens, cached: int
) -> None:
    """Requests that come and go, resets, an end: every token is right, and so many of each prompt
    come from caches."""

    def come(engine: VllmEngine) -> None:
        served = engine.serve(asked, at_once=2)
        assert served.tokens == wanted
        assert min(served.cached) >= cached, served.cached

    engine = opened()
    assert engine.serve(asked, at_once=2).tokens == wanted
    for seed in range(3):
        stormed = engine.storm(asked * 3, seed=seed, resets=True, max_tokens=8)["tokens"]
        assert [one or good for one, good in zip(stormed, wanted * 3, strict=True)] == wanted * 3
    engine.reset(connector=True)  # a reset of the storm may have left what the device has
    assert engine.serve(asked, at_once=2).tokens == wanted
    engine.zero_device()
    engine.reset()
    come(engine)
    engine.close()
    again = opened()
    come(again)
    # negative control: the bytes of the host tier decide
    again.zero_host()
    again.reset()
    assert again.serve(asked, at_once=2).tokens != wanted
    again.close()


def test_storage_after_an_end_with_other_weights_and_with_damage(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    wanted = alone(PROMPTS)
    extra = offloading(SMALL, tmp_path / "store")
    engine = start(extra)
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.reset()
    comes_whole(engine, wanted, 2)
    metrics = engine.metrics()
    assert metrics[READ] > 0
    assert metrics[WRITTEN] >= 40 * stores.CHUNK_BYTES
    assert metrics[HEALTHY] == 1
    engine.close()
    # the weights of another model under the same path
    write_model(tmp_path / "model", seed=6)
    other = start(extra)
    served = other.serve(PROMPTS, at_once=2)
    assert max(served.cached) <= 64
    assert served.tokens != wanted
    other.close()
    # the files of a model that is copied again have other times
    write_model(tmp_path / "model")
    again = start(extra)
    comes_whole(again, wanted, 2)
    again.close()
    computed_and_stored_again(start, extra, wanted, tmp_path / "store")


@pytest.mark.parametrize("kind", ["object", "valkey"])
def test_a_store_that_nodes_share_after_an_end(
    start: Start, alone: Alone, tmp_path: Path, kind: str
) -> None:
    wanted, folder = alone(PROMPTS), tmp_path / "store"
    folder.mkdir()
    with valkey_server("--maxmemory", "64mb") as server:
        given: dict[str, Any] = {
            "object": {"url": folder.as_uri()},
            "valkey": {"valkey": {"url": server.url}},
        }
        extra = offloading(SMALL) | {"storage": {"backend": kind, **given[kind]}}
        for seen_before in (False, True):
            engine = start(extra)
            if not seen_before:
                assert engine.serve(PROMPTS, at_once=2).tokens == wanted
                engine.reset()
            comes_whole(engine, wanted, 2)
            engine.close()
        if kind == "object":
            computed_and_stored_again(start, extra, wanted, folder, "???/*")


def computed_and_stored_again(
    start: Start, extra: dict[str, Any], wanted: Tokens, store: Path, files: str = "slab-*"
) -> None:
    """Chunks whose bits are flipped are misses, which are counted and logged, and stored again."""
    stores.flip(store, files)
    engine = start(extra)
    flipped: Served = engine.serve(PROMPTS, at_once=2)
    assert flipped.tokens == wanted
    assert max(flipped.cached) <= 64
    assert engine.metrics()[FAILED] > 0
    assert "corrupt object" in engine.log.read_text(), "kvactors is silent in vLLM's log"
    engine.reset()
    comes_whole(engine, wanted, 2)
    engine.close()
    assert engine.regions() == []


def test_scheduler_and_worker_in_separate_processes_and_kill_9(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    wanted = alone(PROMPTS)
    extra = offloading(SMALL, tmp_path / "store")
    engine = start(extra, one_process=False, distributed_executor_backend="mp")
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.reset()
    comes_whole(engine, wanted, 2)
    assert len(engine.children()) >= 2
    assert len(engine.regions()) == 1
    engine.kill()
    killed, engine = engine, start(extra, one_process=False, distributed_executor_backend="mp")
    assert killed.regions() == []
    comes_whole(engine, wanted, 2)
    engine.close()
    assert engine.regions() == []


def test_a_tier_below_vllms_host_tier_after_kill_9_and_under_the_next_version(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    wanted = alone(PROMPTS)
    extra = stores.tier(2 * SMALL, tmp_path / "store")
    engine = start(extra)
    assert engine.serve(PROMPTS, at_once=2).tokens == wanted
    engine.close()
    engine = start(extra, version=NEWER)
    assert engine.opened["version"].startswith(NEWER)
    comes_whole(engine, wanted, 2)
    assert engine.metrics()[READ] > 0
    engine.kill()
    computed_and_stored_again(start, extra, wanted, tmp_path / "store")
