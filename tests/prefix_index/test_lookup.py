"""Look-ups without a cache, compared with a model that walks block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.actor.sliced import finish
from kvactors.lease import Hits
from kvactors.lookup import PromptHits, count_hits
from kvactors.native import Path
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.tree import BlockIndex
from kvactors.types import split_hashes
from tests.prefix_index.objects import BLOCK, path

LENGTH = 6


class Case(NamedTuple):
    """Blocks on the device, then blocks that left it: for each whether the host has it. stored:
    positions that the store holds."""

    device: int
    host: list[bool]
    stored: set[int]


cases = st.builds(
    Case,
    st.integers(0, LENGTH),
    st.lists(st.booleans(), max_size=LENGTH),
    st.sets(st.integers(0, LENGTH - 1)),
)


def build(case: Case, *, recompute: bool) -> BlockIndex:
    index = BlockIndex(BLOCK, LENGTH, 64, recompute_last_token=recompute)
    whole = path(min(LENGTH, case.device + len(case.host)))
    index.tree.pin(whole)
    whole.assign(0, index.take(whole.num_full_blocks))
    index.tree.commit(whole, whole.num_full_blocks)
    index.pool.give(index.tree.release(whole))
    left = whole.num_full_blocks - case.device
    if left > 0:
        eviction = index.evict(left, 1)  # the deepest first
        mask = bytes(case.host[left - 1 - n] for n in range(left))
        index.finish_evict(eviction, mask)
    return index


class Store:
    """A store that holds the blocks at some positions of a path."""

    def __init__(self, prompt: Path, stored: set[int]) -> None:
        keys = split_hashes(prompt.hashes(0, prompt.num_full_blocks))
        self.held = {key for position, key in enumerate(keys) if position in stored}

    def held_run(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.held), len(keys))


def modelled(case: Case, tokens: int, recompute: bool, fetch: bool, most: int, media: Any) -> Hits:
    """The hits, found block by block."""
    limit = tokens // BLOCK
    if recompute and limit * BLOCK == tokens:
        limit -= 1
    known = min(LENGTH, case.device + len(case.host))
    hosted = {case.device + n for n, on in enumerate(case.host) if on and case.device + n < known}
    device = min(case.device, limit)
    missing = [p for p in range(device, limit) if p not in hosted] if fetch else []
    found = next((n for n, p in enumerate(missing) if p not in case.stored), len(missing))
    stored = set(missing[: min(found, most)])
    tiers = ["device"] * device
    while len(tiers) < limit and len(tiers) in hosted | stored:
        tiers.append("host" if len(tiers) in hosted else "storage")
    for offset, length in reversed(media):
        if offset < len(tiers) * BLOCK < offset + length:
            del tiers[offset // BLOCK :]
    return Hits(tiers.count("device"), tiers.count("host"), tiers.count("storage"))


@settings(deadline=None, derandomize=True)
@given(
    case=cases,
    tokens=st.integers(1, LENGTH * BLOCK),
    recompute=st.booleans(),
    fetch=st.booleans(),
    most=st.sampled_from([0, 1, 2, LENGTH]),
    media=st.sampled_from([(), ((1, 4),), ((1, 2), (3, 5)), ((0, 7),)]),
)
def test_a_lookup_equals_a_walk_block_by_block(
    case: Case, tokens: int, recompute: bool, fetch: bool, most: int, media: Any
) -> None:
    index = build(case, recompute=recompute)
    prompt = Path(BLOCK, bytes(32))
    prompt.extend(list(range(tokens)))
    chosen = IndexSettings(exclusive=True, host_tier=True, fetch=fetch)
    before = (index.tree.statistics(), index.pool.free)
    store: Any = Store(path(LENGTH), case.stored)
    found = finish(count_hits(index, chosen, store, partial(min, most), prompt, media))
    assert found == modelled(case, tokens, recompute, fetch, most, media)
    assert found.new_blocks == -(-tokens // BLOCK) - found.device
    assert (index.tree.statistics(), index.pool.free) == before
    match = index.match(prompt, fetch=chosen.fetchable(prompt), media=media)
    assert match.num_device_blocks >= found.device
    assert match.expected_blocks >= found.total, "an acquire looks for less than was found"
    index.pool.give(index.tree.release(prompt))


def test_nothing_below_a_leaving_block_is_a_hit() -> None:
    """The copy of a block completes before that of its child: the child cannot be loaded yet."""
    index = build(Case(2, [], set()), recompute=False)
    index.evict(1, 1)
    index.finish_evict(index.evict(1, 2), b"\1")
    prompt = path(4)
    chosen = IndexSettings(exclusive=True, host_tier=True, fetch=True)
    store: Any = Store(prompt, {1, 2, 3})
    assert finish(count_hits(index, chosen, store, None, prompt, ())) == Hits(0, 1, 0)
    assert index.match(prompt, fetch=chosen.fetchable(prompt)).expected_blocks == 1


def test_a_stored_prompt_is_hashed_in_bounded_steps_up_to_the_first_miss() -> None:
    index = build(Case(0, [], set()), recompute=False)
    index.turn_blocks, blocks, held = 64, 300, 150
    prompt = path(blocks)
    chosen = IndexSettings(exclusive=True, host_tier=True, fetch=True)
    store: Any = Store(path(blocks), set(range(held)))
    steps = count_hits(index, chosen, store, None, prompt, ())
    hashed = [0, *(prompt.num_hashed for _ in steps)]
    assert max(after - before for before, after in pairwise(hashed)) <= index.turn_blocks // 4
    assert held < prompt.num_hashed <= held + index.turn_blocks // 4
    assert finish(count_hits(index, chosen, store, None, prompt, ())) == Hits(0, 0, held)


def test_the_hits_of_a_prompt_equal_those_of_its_lease() -> None:
    found = PromptHits(1, 2, 3, num_tokens=100, block_size=4, new_blocks=24)
    assert found == Hits(1, 2, 3)
    assert (found.total, found.cached_tokens, found.tokens) == (6, 24, Hits(4, 8, 12))
