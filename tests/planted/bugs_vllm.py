"""Planted bugs of the vLLM adapter. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/integrations/test_vllm.py::"
LMCACHE_TESTS = "tests/integrations/lmcache/test_parts.py::"
GPU_TESTS = "tests/integrations/test_vllm_worker.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "vllm_engine_id_of_two_engines",
        "integrations/vllm/region.py",
        "            if rank is None:\n                self._claim = self._claim_id(engine_id)\n",
        "",
        "two engines with one engine_id overwrite each other's host memory, and other tokens "
        "come out",
        (TESTS + "test_a_second_engine_with_the_same_id_is_refused",),
    ),
    Mutation(
        "vllm_region_in_use_is_removed",
        "integrations/vllm/region.py",
        "    except OSError:\n        return False\n    if not _is_current(lock, path):",
        "    except OSError:\n        pass\n    if not _is_current(lock, path):",
        "the start of an engine removes the host memory of those that run: their workers that "
        "start later map other memory",
        (TESTS + "test_a_region_goes_with_its_last_process",),
    ),
    Mutation(
        "vllm_wildcard_in_the_name_of_a_region",
        "integrations/vllm/region.py",
        'for file in (FOLDER / f"vllm_offload_{name}.mmap", FOLDER / f"{name}.engine"):',
        'for file in FOLDER.glob(f"*{name}.*"):',
        "a file of another user with a wildcard in its name removes the host memory of engines",
        (TESTS + "test_regions_without_a_process_are_removed_and_no_others",),
    ),
    Mutation(
        "vllm_layout_is_no_part_of_the_identity",
        "integrations/vllm/settings.py",
        '        "kv_cache_layout": config.kv_cache_layout,\n',
        "",
        "an engine with another layout reads chunks whose bytes are in another order",
        (TESTS + "test_blocks_of_engines_that_differ_are_apart",),
    ),
    Mutation(
        "vllm_host_tier_bound_after_its_pages_were_touched",
        "integrations/vllm/region.py",
        "            with pages_from(numa_node, ",
        "            with pages_from(None, ",
        "the host tier's pages come from any NUMA node, whatever numa_node says",
        (TESTS + "test_the_pages_of_a_region_come_from_the_node_of_the_settings",),
    ),
    Mutation(
        "vllm_engine_stays_bound_to_the_node",
        "device/arena.py",
        "        _set_policy(mode.value, mask)\n",
        "        pass\n",
        "all later memory of the engine's process comes from one NUMA node",
        (TESTS + "test_the_pages_of_a_region_come_from_the_node_of_the_settings",),
    ),
    Mutation(
        "vllm_copies_do_not_wait_for_the_model",
        "integrations/vllm/spec.py",
        "return int(current_platform.current_stream().cuda_stream)",
        "return 0",
        "a store copies a block that the model has not computed yet",
        (GPU_TESTS + "test_chunks_go_to_the_host_and_back_behind_the_models_stream",),
    ),
    Mutation(
        "vllm_failed_copy_of_a_gpu_is_a_success",
        "integrations/vllm/region.py",
        "            if ended.error:\n",
        "            if not ended.job:\n",
        "blocks whose copy failed are used: the model computes with other bytes",
        (GPU_TESTS + "test_a_copy_of_the_gpu_that_fails_is_named_and_is_no_success",),
    ),
    Mutation(
        "vllm_workers_share_chunks_of_other_orders",
        "integrations/vllm/spec.py",
        "copied_by=self._copied_by",
        'copied_by="vllm"',
        "chunks that one worker has written are read by the other, with their bytes in disorder",
        (GPU_TESTS + "test_the_order_of_a_chunks_bytes_is_part_of_its_identity",),
    ),
    Mutation(
        "lmcache_staging_memory_ignores_its_node",
        "integrations/lmcache/settings.py",
        ", numa_node=settings.numa_node)",
        ")",
        "the staging memory comes from any NUMA node",
        (LMCACHE_TESTS + "test_the_staging_memory_comes_from_the_node_of_the_settings",),
    ),
    Mutation(
        "sglang_linker_ignores_the_node_of_its_memory",
        "integrations/sglang/settings.py",
        "        numa_node=settings.numa_node,\n",
        "",
        "the linker's host memory comes from any NUMA node",
        ("tests/integrations/test_sglang_linker.py::test_the_host_memory_must_hold_a_page",),
    ),
    Mutation(
        "weights_are_no_part_of_the_name",
        "integrations/model_files.py",
        "map(_digest_of, files)",
        '[b""]',
        "new weights under the same path read the KV of earlier ones",
        ("tests/integrations/test_model_files.py::test_a_copy_has_the_digest_until_it_changes",),
    ),
    Mutation(
        "vllm_latent_attention_on_a_cpu",
        "integrations/vllm/settings.py",
        "if platform.is_cpu() and model.use_mla and not cache.enable_prefix_caching:",
        "if False:",
        "vLLM computes other tokens behind blocks that were loaded",
        (TESTS + "test_an_engine_that_cannot_compute_behind_cached_blocks_is_refused",),
    ),
)
