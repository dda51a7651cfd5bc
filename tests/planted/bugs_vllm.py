"""Planted bugs of the vLLM adapter. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/integrations/test_vllm.py::"

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
)
