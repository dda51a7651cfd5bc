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
)
