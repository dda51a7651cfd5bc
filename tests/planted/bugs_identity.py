"""Planted bugs in what blocks, stores and indexes are identified by, and in the settings that decide it."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "model_not_in_the_root",
        "identity.py",
        "field(TAG_MODEL, self.model.encode()) + ",
        "",
        "two models of one shape share blocks",
        ("tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another",),
    ),
    Mutation(
        "rank_not_in_the_store_identity",
        "identity.py",
        "(TAG_RANK, str(self.rank).encode())",
        '(TAG_RANK, b"")',
        "exchanged rank folders serve each other's parts of a block",
        ("tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_store_identity_into_another",),
    ),
    Mutation(
        "direct_store_ignores_the_scope",
        "prefix_index/transfers.py",
        "return path.num_plain_blocks if path.root == self.token_root else 0",
        "return path.num_plain_blocks",
        "a store that is addressed by tokens serves one tenant's blocks to another",
        ("tests/storage/test_attention_store_identity.py::test_another_scope_or_medium_is_neither_read_nor_written",),
    ),
    Mutation(
        "direct_store_ignores_media",
        "prefix_index/transfers.py",
        "return path.num_plain_blocks if",
        "return path.num_full_blocks if",
        "a store that is addressed by tokens serves one image's blocks for another",
        ("tests/storage/test_attention_store_identity.py::test_blocks_from_a_medium_on_are_neither_stored_nor_read",),
    ),
    Mutation(
        "medium_of_a_partial_block_forgotten",
        "arguments.py",
        "blocks = -(-path.num_tokens // block_size)",
        "blocks = path.num_full_blocks",
        "a block that decoding completes is shared between images",
        ("tests/storage/test_attention_store_identity.py::test_a_block_completed_by_decoding_keeps_its_medium",),
    ),
    Mutation(
        "namespace_not_at_the_service",
        "attention_store.py",
        "if config.cache.namespace != CacheConfig().namespace:",
        "if False:",
        "AttentionStore serves blocks of earlier weights after a restart with another cache.namespace",
        ("tests/storage/test_attention_store_identity.py::test_models_and_namespaces_have_names_of_their_own_at_the_service",),
    ),
    Mutation(
        "more_blocks_read_than_asked_for",
        "attention_store.py",
        "or not 0 <= count <= most:",
        "or not 0 <= count:",
        "an SDK that claims more blocks than it was asked for is believed",
        ("tests/storage/test_attention_store_identity.py::test_a_wrong_answer_is_a_miss_that_is_counted",),
    ),
    Mutation(
        "sdk_raises_no_exception",
        "attention_store.py",
        "        except BaseException as error:\n            raise SdkError",
        "        except Exception as error:\n            raise SdkError",
        "a panic of the SDK ends the job without an answer",
        ("tests/storage/test_attention_store_identity.py::test_a_wrong_answer_is_a_miss_that_is_counted",),
    ),
    Mutation(
        "clear_of_a_store_that_cannot_be_cleared",
        "cache.py",
        'if check_flag("storage", storage) and self.system.direct is not None:',
        "if False:",
        "clear(storage=True) returns although nothing was removed from AttentionStore",
        ("tests/storage/test_attention_store_identity.py::test_it_cannot_be_cleared_and_says_so_before_anything_is_cleared",),
    ),
    Mutation(
        "index_by_tokens_gets_every_block",
        "flush_notifier/ledger.py",
        "if view.by_tokens and not entry.by_tokens:",
        "if False:",
        "an index that is addressed by tokens holds blocks of other scopes and images",
        ("tests/flush_notifier/test_by_tokens.py::test_a_token_path_of_two_scopes_is_gone_when_the_opened_ones_block_is",),
    ),
    Mutation(
        "block_with_a_medium_counts_as_plain",
        "flush_notifier/ledger.py",
        "entry.by_tokens = key == block_hash(parent_key, tokens)",
        "entry.by_tokens = True",
        "an index that is addressed by tokens holds blocks of images",
        (
            "tests/flush_notifier/test_by_tokens.py::test_only_leading_blocks_without_extra_keys_of_the_opened_scope_are_announced",
        ),
    ),
)
