"""RETAIN in the host tier: its victims, its guard, and the rules of the tree under any reports of the
host tier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.native import BlockTree, LifeTables, Path
from kvactors.types import split_hashes
from tests.native.test_retain import requests
from tests.support import adversaries
from tests.support.two_tiers import ROOT, TwoTiers


@settings(max_examples=20)
@given(trace=requests(most=60), device=st.integers(6, 24), host=st.integers(1, 40))
def test_the_guard_compares_with_an_exact_lru_of_both_tiers(trace, device, host):
    tiers, recent, lru, ours = TwoTiers(device, host, LifeTables(True)), [], 0, 0
    for ids, now, output in trace:
        size = len(recent_of(tiers))
        on_device, on_host, _ = tiers.request(np.array(ids, np.uint32), now, output)
        ours += on_device + on_host
        if len(ids) > device:
            continue
        kept = set(recent[:size])
        lru += next((at for at, one in enumerate(ids) if one not in kept), len(ids))
        recent = ids + [one for one in recent if one not in ids]
        tiers.tree.check()
    counts = tiers.tree.retention(True)
    assert (counts["hits"], counts["shadow_hits"]) == (ours, lru)
    assert counts["resident"] == len(recent_of(tiers))
    assert counts["displaced"] == len(set(recent[: counts["resident"]]) - recent_of(tiers))
    assert counts["chosen"] + counts["oldest"] == len(tiers.left)


def recent_of(tiers: TwoTiers) -> set[int]:
    """The blocks of both tiers."""
    found = set()
    for _, tokens, _, states in tiers.tree.paths():
        ids = np.frombuffer(tokens, np.uint32).tolist()
        found |= {one for one, state in zip(ids, states, strict=True) if state}
    return found


@settings(max_examples=30)
@given(
    trace=requests(most=50),
    size=st.integers(8, 64),
    order=st.randoms(use_true_random=False),
    device_too=st.booleans(),
)
def test_any_reports_of_the_host_tier_keep_the_rules(trace, size, order, device_too):
    # Requests overlap, copies fail, and the host tier loses blocks in any order, or all of them.
    tables = LifeTables()
    tree = BlockTree(1, 0, False, tables if device_too else None, True, retain_host=tables)
    free, running, copying, named = list(range(size)), [], [], []

    def end_one():
        path, output = running.pop(order.randrange(len(running)))
        tree.touch(path, output)
        tree.release(path)

    def end_copy():
        nodes = copying.pop(0)
        free.extend(
            tree.finish_offload(nodes, bytes(order.random() < 0.8 for _ in range(len(nodes))))[0]
        )

    for ids, now, output in trace:
        tree.advance(now)
        path = Path(1, ROOT)
        path.extend(np.array(ids, np.uint32))
        hits, _ = tree.pin(path)
        tree.trim(path, hits)
        if (missing := len(ids) - hits) > len(free):
            copying.append(tree.evict(missing - len(free))[0])
            while copying and (len(free) < missing or order.random() < 0.5):
                end_copy()
        if missing > len(free):
            tree.release(path)
        else:
            path.assign(hits, [free.pop() for _ in range(missing)])
            tree.commit(path, len(ids))
            running.append((path, output))
        while running and order.random() < 0.6:
            end_one()
        chosen = split_hashes(tree.host_victims(order.randint(0, 5)))
        assert len(set(chosen)) == len(chosen)
        named += chosen
        lost = [one for one in named if order.random() < 0.7]
        tree.host_blocks_removed(b"".join(lost))
        named = [one for one in named if one not in lost and order.random() < 0.9]
        if order.random() < 0.05:
            tree.clear_host()
        if order.random() < 0.3:
            tree.sweep_host(order.randint(0, 8))
        if order.random() < 0.3:
            some = path_hashes(ids)
            tree.host_blocks_added(b"".join(order.sample(some, len(some) // 2)))
        tree.check()
        assert tree.host_kept(exclusive=True) <= tree.statistics()["host"]
    while running:
        end_one()
    while copying:
        end_copy()
    while tree.host_victims(3):
        tree.check()
    assert tree.host_kept(exclusive=True) == 0


def path_hashes(ids):
    path = Path(1, ROOT)
    path.extend(np.array(ids, np.uint32))
    return split_hashes(path.hashes(0, len(ids)))


@pytest.mark.parametrize("retain", [(True, True), (False, True)])
def test_it_learns_a_cycle_that_lru_never_hits(retain):
    """40 prompts of 3 blocks in turns, and 100 blocks in both tiers together."""
    tiers = TwoTiers(20, 80, LifeTables(), retain)
    hits = 0
    for number in range(1500):
        first = number % 40 * 3
        found = tiers.request(np.arange(first, first + 3, dtype=np.uint32), number * 2.0)
        hits += found[0] + found[1]
    tiers.tree.check()
    assert tiers.tree.retention(True)["shadow_hits"] == 0
    assert hits > 2000


def test_both_tiers_share_what_one_of_them_observes():
    """An observation counts once, so the device evicts the same blocks with and without the
    host's policy, as long as both tiers hold all blocks."""
    alone, both = (TwoTiers(30, 9000, LifeTables(), (True, host)) for host in (False, True))
    for one in adversaries.first(adversaries.ADVERSARIES["branches"], 400):
        ids = np.array(one.ids, np.uint32)
        assert (
            alone.request(ids, one.now, one.output)[0] == both.request(ids, one.now, one.output)[0]
        )


def test_blocks_that_leave_an_lru_of_both_tiers_leave_the_device():
    """The device keeps old blocks by its own record. While the record of both tiers is bad, it
    lets go of those that the host would otherwise have to evict younger ones for."""
    tiers, over = TwoTiers(300, 600, LifeTables()), 0
    for one in adversaries.first(adversaries.ADVERSARIES["heavy tail of pauses"], 2500):
        tiers.request(np.array(one.ids, np.uint32), one.now, one.output)
        counts = tiers.tree.retention(True)
        over += counts["displaced"] > counts["limit"] + 50
    counts = tiers.tree.retention(True)
    assert counts["shadow_hits"] - counts["hits"] < 120
    assert over < 25
