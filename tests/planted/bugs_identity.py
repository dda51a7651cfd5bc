"""Planted bugs in the identities of blocks, stores and indexes, and in the settings that
decide it."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "model_not_in_the_root",
        "identity.py",
        "field(TAG_MODEL, self.model.encode()) + ",
        "",
        "two models of one shape share blocks",
        (
            "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another",
        ),
    ),
    Mutation(
        "rank_not_in_the_store_identity",
        "identity.py",
        "(TAG_RANK, str(self.rank).encode())",
        '(TAG_RANK, b"")',
        "exchanged rank folders serve each other's parts of a block",
        (
            "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_store_identity_into_another",
        ),
    ),
    Mutation(
        "direct_store_ignores_the_scope",
        "prefix_index/settings.py",
        "return path.num_plain_blocks if path.root == self.token_root else 0",
        "return path.num_plain_blocks",
        "a store that is addressed by tokens serves one tenant's blocks to another",
        (
            "tests/storage/test_attention_store_identity.py::test_another_scope_or_medium_is_neither_read_nor_written",
        ),
    ),
    Mutation(
        "direct_store_ignores_media",
        "prefix_index/settings.py",
        "return path.num_plain_blocks if",
        "return path.num_full_blocks if",
        "a store that is addressed by tokens serves one image's blocks for another",
        (
            "tests/storage/test_attention_store_identity.py::test_blocks_from_a_medium_on_are_neither_stored_nor_read",
        ),
    ),
    Mutation(
        "medium_of_a_partial_block_forgotten",
        "arguments.py",
        "blocks = -(-path.num_tokens // block_size)",
        "blocks = path.num_full_blocks",
        "a block that decoding completes is shared between images",
        (
            "tests/storage/test_attention_store_identity.py::test_a_block_completed_by_decoding_keeps_its_medium",
        ),
    ),
    Mutation(
        "namespace_not_at_the_service",
        "sdk_settings.py",
        'version_suffix="" if namespace == CacheConfig().namespace else',
        'version_suffix="" if namespace else',
        "AttentionStore serves blocks of earlier weights after a restart with another "
        "cache.namespace",
        (
            "tests/storage/test_attention_store_identity.py::test_models_and_namespaces_have_their_own_names_at_the_service",
        ),
    ),
    Mutation(
        "more_blocks_read_than_asked_for",
        "attention_store.py",
        "or not 0 <= count <= most:",
        "or not 0 <= count:",
        "an SDK that claims more blocks than it was asked for is not refused",
        (
            "tests/storage/test_attention_store_identity.py::test_a_wrong_answer_is_a_miss_that_is_counted",
        ),
    ),
    Mutation(
        "sdk_raises_no_exception",
        "attention_store.py",
        "        except BaseException as error:\n            raise SdkError",
        "        except Exception as error:\n            raise SdkError",
        "a panic of the SDK ends the job without an answer",
        (
            "tests/storage/test_attention_store_identity.py::test_a_wrong_answer_is_a_miss_that_is_counted",
        ),
    ),
    Mutation(
        "clear_of_a_store_that_cannot_be_cleared",
        "tenants.py",
        "if self.system.device_store is not None and salt is None:",
        "if False:",
        "clear(storage=True) returns although nothing was removed from AttentionStore",
        (
            "tests/storage/test_attention_store_identity.py::test_clear_is_refused_before_anything_is_cleared",
        ),
    ),
    Mutation(
        "index_by_tokens_gets_every_block",
        "flush_notifier/blocks.py",
        "(block.token_addressed or not sink.by_tokens)",
        "True",
        "an index that is addressed by tokens holds blocks of other scopes and images",
        (
            "tests/flush_notifier/test_by_tokens.py::test_a_token_path_of_two_scopes_is_gone_when_the_opened_ones_block_is",
        ),
    ),
    Mutation(
        "block_with_a_medium_counts_as_plain",
        "flush_notifier/ledger.py",
        "            block.token_addressed = block_hash == hash_of_block(parent_hash, tokens)\n",
        "            block.token_addressed = True\n",
        "an index that is addressed by tokens holds blocks of images",
        (
            "tests/flush_notifier/test_by_tokens.py::test_only_leading_blocks_without_extra_keys_of_the_opened_scope_are_announced",
        ),
    ),
    Mutation(
        "settings_of_another_layout_ignored",
        "applicable.py",
        "if name not in used | LAYOUT_COMMON:",
        "if False:",
        "quantization with an MLA layout is accepted and does nothing",
        (
            "tests/config/test_settings_without_use.py::test_a_setting_that_a_layout_does_not_have_is_an_error",
        ),
    ),
    Mutation(
        "settings_of_another_store_ignored",
        "applicable.py",
        "        if name not in used:\n",
        "        if False:\n",
        "capacity_blocks with AttentionStore is accepted and does nothing",
        (
            "tests/config/test_settings_without_use.py::test_a_setting_that_a_store_does_not_have_is_an_error",
        ),
    ),
    Mutation(
        "constructed_configs_not_checked",
        "validation.py",
        "        check_values(getattr(config, name), name)",
        "        pass",
        "a config made by its constructor may hold anything",
        ("tests/config/test_ranges.py::test_numbers_out_of_range_are_named",),
    ),
    Mutation(
        "store_without_a_model",
        "environment.py",
        "    validate_model(config)\n",
        "",
        "two models share a store by default",
        ("tests/config/test_model.py::test_storage_and_sinks_need_a_model",),
    ),
    Mutation(
        "given_device_contradicted",
        "device/__init__.py",
        "if config.device.num_blocks != DeviceConfig().num_blocks:",
        "if False:",
        "device.num_blocks is ignored when a device is given",
        (
            "tests/device/test_given_device.py::test_settings_that_describe_another_device_are_named",
        ),
    ),
    Mutation(
        "flush_only_without_an_index",
        "environment.py",
        'if not config.flush.flush_only or config.storage.backend != "attention_store":',
        "if True:",
        "FastDeploy's flush-only settings feed no index",
        (
            "tests/storage/test_attention_store_identity.py::test_fastdeploys_flush_only_settings_feed_the_index",
        ),
    ),
)
