"""Planted bugs of behaviours that FastDeploy's tests expect of storage and layouts. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

ANSWERS = "tests/storage/test_mooncake_answers.py"
COPIES = "tests/integrations/fastdeploy/test_copies.py"
ENDS = "tests/integrations/fastdeploy/test_end_to_end.py"
STUCK = "tests/integrations/fastdeploy/test_stuck_calls.py"
TRANSFERS = "tests/integrations/fastdeploy/test_transfers.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "mooncake_local_buffer_is_not_compared_with_the_limit",
        "mooncake_config.py",
        """\
    _check_local_buffer(resolved, environ)
""",
        "",
        "over RDMA a part of the client's buffer is not registered",
        (f"{ANSWERS}::test_a_local_buffer_larger_than_a_registration_is_named",),
    ),
    Mutation(
        "mooncake_empty_write_raises",
        "storage/backends/mooncake_objects.py",
        """\
            for some, then in zip(calls, [*calls[1:], None], strict=False):
""",
        """\
            for some, then in zip(calls, [*calls[1:], None], strict=True):
""",
        "a write of no objects raises, and counts as a fault of the pool",
        (f"{ANSWERS}::test_empty_batches_reach_no_pool",),
    ),
    Mutation(
        "fastdeploy_scales_are_not_stored",
        "integrations/fastdeploy/lower_tiers.py",
        """\
        return [tensors[piece.layer, piece.role] for piece in self.pieces]
""",
        """\
        return [
            tensors[piece.layer, piece.role.replace("value_scale", "key_scale")]
            for piece in self.pieces
        ]
""",
        "a block of an fp8 cache comes back with the scales of its keys for its values",
        (
            f"{COPIES}::test_a_stored_block_has_the_key_value_and_scales_of_every_layer_and_rank",
            f"{COPIES}::test_equal_prompts_have_equal_bytes_and_scales",
        ),
    ),
    Mutation(
        "fastdeploy_write_that_raises_keeps_its_hold",
        "integrations/fastdeploy/manager.py",
        """\
        finally:
            if late is None:
""",
        """\
        finally:
            if record is None:
""",
        "the blocks of a request whose write has raised are never free, and every reset fails",
        (f"{TRANSFERS}::test_the_hold_of_a_write_ends_with_an_exception",),
    ),
    Mutation(
        "fastdeploy_tail_is_written_from_other_slots",
        "integrations/fastdeploy/lower_tiers.py",
        """\
            views = [staging.memory.view(slot) for slot in slots]
""",
        """\
            views = [staging.memory.view(slot) for slot in reversed(slots)]
""",
        "blocks that are written together are stored under each other's hashes",
        (f"{TRANSFERS}::test_only_the_tail_is_copied_and_written_from_its_slots",),
    ),
    Mutation(
        "fastdeploy_draft_layers_are_not_moved",
        "integrations/fastdeploy/lower_tiers.py",
        """\
        return [tensors[piece.layer, piece.role] for piece in self.pieces]
""",
        """\
        return [tensors[piece.layer - piece.extra, piece.role] for piece in self.pieces]
""",
        "a block comes back with the bytes of draft layers that another request has computed",
        (f"{ENDS}::test_20_different_prompts_leave_the_device_and_are_found_in_host_memory",),
    ),
    Mutation(
        "fastdeploy_reset_frees_lost_blocks",
        "integrations/fastdeploy/requests.py",
        """\
        self._free[:] = [block for block in range(self.total) if block not in self.lost]
""",
        """\
        self.lost.clear()
        self._free[:] = range(self.total)
""",
        "after a reset a late read of AttentionStore writes the blocks of another request",
        (f"{STUCK}::test_a_read_that_returns_late_writes_no_block_of_another_request",),
    ),
    Mutation(
        "fastdeploy_late_write_keeps_no_blocks",
        "integrations/fastdeploy/manager.py",
        """\
            late = error.answer  # the SDK may read the blocks before it returns
""",
        "",
        "a late write to AttentionStore stores the bytes of another request",
        (f"{STUCK}::test_a_write_that_returns_late_stores_no_bytes_of_another_request",),
    ),
)
