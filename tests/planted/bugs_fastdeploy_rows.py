"""Planted bugs of behaviours that FastDeploy's tests expect of storage and layouts. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

ANSWERS = "tests/storage/test_mooncake_answers.py"
COPIES = "tests/integrations/fastdeploy/test_copies.py"

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
        "integrations/fastdeploy/tensor_names.py",
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
)
