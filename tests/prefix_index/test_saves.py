"""SaveTable: the parts of paths that are being saved."""

from __future__ import annotations

from kvactors.cpu_evictor.messages import Save
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.host import SavedPath
from kvactors.types import HASH_BYTES
from tests.prefix_index.objects import core, effects_of, path


def committed(state: PrefixIndex, blocks: int) -> SavedPath:
    """A path of so many cached blocks, held, with the part that its closing is."""
    made = path(blocks, root=state.roots.root(PLAIN))
    state.index.tree.pin(made)
    made.assign(0, state.index.take(blocks))
    state.index.tree.commit(made, blocks)
    return SavedPath(state.index.tree, made, 1)


def save(state: PrefixIndex, whole: SavedPath, start: int, stop: int) -> Save:
    [admit] = effects_of(state.saves.start, whole, start, stop)
    assert isinstance(admit, Save)
    return admit


def test_a_part_names_the_block_above_it_and_is_held_until_all_are_answered():
    state = core(exclusive=False, part=2)
    whole = committed(state, 3)
    assert list(state.saves.ranges(3)) == [(0, 2), (2, 3)]
    first, second = save(state, whole, 0, 2), save(state, whole, 2, 3)
    assert first.root == whole.path.root
    assert second.root == whole.path.hashes(1, 2)
    assert second.hashes == whole.path.hashes(2, 3)
    assert first.keep
    assert not whole.answered(), "its closing"
    found = state.saves.finish(second.op, b"\1")
    assert found is whole
    assert not whole.answered()
    assert state.saves.finish(first.op, b"\0\0") is whole
    assert whole.answered(), "the last part"
    assert state.saves.finish(first.op, b"\0\0") is None
    assert not state.saves
    assert state.index.tree.statistics()["host"] == 1


def test_only_blocks_with_enough_hits_are_written_to_the_store():
    state = core(save="write_through_selective", min_hits=2)
    whole = committed(state, 3)
    assert effects_of(state.saves.start, whole, 0, 3) == []
    again = path(2, root=whole.path.root)
    state.index.tree.pin(again)
    assert save(state, whole, 0, 3).save == (0, 1)


def test_a_store_addressed_by_tokens_gets_the_whole_path_of_its_scope():
    state = core(part=2)
    own = state.roots.root(PLAIN)
    state = core(part=2, save="write_through", token_root=own)
    whole = committed(state, 5)
    [(start, stop)] = state.saves.ranges(5)
    admit = save(state, whole, start, stop)
    assert admit.tokens == whole.path.tokens(0, 5)
    other = core(part=2, save="write_through", token_root=bytes(HASH_BYTES))
    assert effects_of(other.saves.start, committed(other, 2), 0, 2) == [], (
        "another scope is not stored"
    )
