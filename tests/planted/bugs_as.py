"""Planted bugs of AttentionStore as operators set it: variables, shards, the SDK object, ranks. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

ENVIRONMENT = "tests/config/test_environment.py::"
RANKS = "tests/gpu_swapper/test_ranks_attention_store.py::"
FULL = "tests/flush_notifier/test_announce_full.py::"
SIMULATED = "tests/simulation/test_direct_ranks.py"
SHARED = "tests/storage/test_attention_store_shared.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "variable_before_the_config",
        "environment.py",
        "    return value\n",
        "    return variable\n",
        "an environment variable overrides what the config sets",
        (ENVIRONMENT + "test_a_variable_fills_an_unset_setting_and_never_replaces_a_set_one",),
    ),
    Mutation(
        "conflict_not_logged",
        "environment.py",
        "    if value != variable and name not in _logged:\n",
        "    if False:\n",
        "FD_AS_ONLY_FLUSH=1 against another flush.mode is ignored without a log line",
        (ENVIRONMENT + "test_flush_only_in_the_config_comes_before_the_variable",),
    ),
    Mutation(
        "misspelt_variable_not_logged",
        "environment.py",
        "    _log_misspelt(environ)\n    return config\n",
        "    return config\n",
        "FD_AS_ONLY_FLUHS=1 sets nothing, and no log line names it",
        (ENVIRONMENT + "test_an_unknown_variable_with_our_prefix_is_logged_once",),
    ),
    Mutation(
        "flush_only_without_a_sink",
        "flush_notifier/sinks/__init__.py",
        "    if config.flush.flush_only and not (config.flush.sinks or sinks):\n",
        "    if False:\n",
        "flush-only mode without a sink starts, and no index is sent anything",
        (ENVIRONMENT + "test_flush_only_mode_without_a_sink_is_an_error_at_start",),
    ),
    Mutation(
        "shards_not_counted",
        "sdk_settings.py",
        "    ranks = config.ranks.count if config.ranks.count > 1 else "
        "config.layout.tensor_parallel\n",
        "    ranks = 1\n",
        "the SDK is opened for one shard although there are several ranks",
        (ENVIRONMENT + "test_the_number_of_shards_is_that_of_the_ranks",),
    ),
    Mutation(
        "save_of_lost_memory",
        "data_plane/base.py",
        "        if self.device_store is None or self.refuses(generation):\n"
        "            return 0\n"
        "        return await self.device_store.save(",
        "        if self.device_store is None:\n"
        "            return 0\n"
        "        return await self.device_store.save(",
        "a save that waited while a rank's process was replaced stores the new process's memory "
        "under the old tokens",
        ("tests/data_plane/test_generations.py", SIMULATED),
    ),
    Mutation(
        "one_rank_is_enough",
        "data_plane/ranks/store.py",
        "        good = min(counts, default=0)\n",
        "        good = max(counts, default=0)\n",
        "blocks that one rank's shard lacks are served as if all ranks had read them",
        (SIMULATED, RANKS + "test_a_block_missing_on_one_rank_is_a_miss_for_all"),
    ),
    Mutation(
        "slow_device_store_makes_a_rank_silent",
        "data_plane/ranks/leader.py",
        "stored=isinstance(message, StoreObjects | MoveDevice),",
        "stored=isinstance(message, StoreObjects),",
        "a rank whose AttentionStore is slow counts as silent, and no copy is made until it has "
        "answered",
        (RANKS + "test_a_store_that_is_slow_on_one_rank_makes_no_rank_silent",),
    ),
    Mutation(
        "names_of_shards_not_compared",
        "sdk_settings.py",
        "    namespace = sdk_settings(config, layout).shard.names if direct else "
        "storage.namespace\n",
        "    namespace = storage.namespace\n",
        "ranks that name different versions at AttentionStore serve one block's shares of "
        "different weights",
        (RANKS + "test_ranks_that_name_another_version_are_refused",),
    ),
    Mutation(
        "nothing_ends_the_wait_for_a_late_move",
        "storage/device_store.py",
        "            self._late = True\n",
        "            self._late = False\n",
        "every request waits until its own deadline while AttentionStore does not return",
        (
            "tests/storage/test_storage_direct.py::test_nothing_waits_for_a_move_that_takes_longer_than_it_may",
        ),
    ),
    Mutation(
        "full_path_once_only",
        "prefix_index/announcements.py",
        """\
        first = start if self._whole else first
""",
        "",
        "with announce = 'full' an index that lost its state is not sent the paths of later "
        "finishes",
        (FULL + "test_an_index_that_lost_its_state_is_sent_finished_paths_again",),
    ),
    Mutation(
        "sent_blocks_are_not_sent_again",
        "flush_notifier/ledger.py",
        "                    for view in self._announces_full:\n"
        "                        view.doubt(block)\n",
        "",
        "with announce = 'full' only the blocks that are new to the index are sent",
        (FULL + "test_every_finish_sends_the_whole_path_from_block_0",),
    ),
    Mutation(
        "an_object_for_each_use",
        "attention_store.py",
        "        self.shared = SHARED.setdefault(one, ",
        "        self.shared = SHARED.setdefault((one, use), ",
        "the sink and the storage back end open an SDK object each",
        (SHARED + "test_the_sink_and_the_back_end_share_one_sdk_object",),
    ),
    Mutation(
        "medium_imported_for_storage",
        "attention_store.py",
        ".MEDIA_HBM if index else None",
        ".MEDIA_HBM",
        "an SDK without media cannot be used as storage",
        (SHARED + "test_the_medium_is_imported_for_the_index_alone",),
    ),
    Mutation(
        "device_is_not_asked",
        "sdk_settings.py",
        '        return int(getattr(device, "ordinal", 0)) if device.kind == "cuda" else None\n',
        "        return None\n",
        "platform must be written by hand: a GPU's cache opens the SDK with the shorter argument "
        "list",
        (SHARED + "test_platform_and_device_are_those_of_the_cache",),
    ),
    Mutation(
        "match_of_a_save_counts_from_its_start",
        "storage/backends/attention_store.py",
        """\
self.sdk.match(ids, 0, total))
        if found is None:
            return 0
        written = stored = min(max(0, found - start),""",
        """\
self.sdk.match(ids, start, total))
        if found is None:
            return 0
        written = stored = min(max(0, found),""",
        "with a service whose match counts from the root, blocks count as stored that are not",
        (SHARED + "test_either_meaning_of_match_is_right",),
    ),
    Mutation(
        "variables_are_not_checked",
        "environment.py",
        "        check_setting(setting, variable)\n",
        "        str(setting)\n",
        "AS_WRITE_SLICE_BLOCK_NUM=0 opens, and no block is written",
        (f"{ENVIRONMENT}test_a_variable_that_is_used_is_checked_as_the_setting_is",),
    ),
)
