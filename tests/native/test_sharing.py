"""Quotas, priorities and times to live of the tree against a plain model: every eviction takes a
block that no other allowed one precedes."""

from __future__ import annotations

from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvactors.native import BlockTree, Path

PROMPTS = [(0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5), (6, 7, 8)]
USES = st.tuples(
    st.integers(1, 3),
    st.sampled_from(PROMPTS),
    st.integers(-2, 2),
    st.sampled_from([inf, 3.0, 9.0]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), USES),
        st.tuples(
            st.just("evict"),
            st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 5.0, 10.0])),
        ),
        st.tuples(st.just("quota"), st.tuples(st.integers(1, 3), st.integers(0, 4))),
        st.tuples(st.just("forget"), st.integers(1, 3)),
    ),
    max_size=30,
)


class Model:
    """Resident blocks as (salt, path) with their expiry: the latest of the block's hint and of the
    blocks that continued it, until a use that finds none below."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, tuple[int, ...]], float] = {}
        self.floors: dict[tuple[int, tuple[int, ...]], float] = {}
        self.quotas: dict[int, int] = {}

    def use(self, salt, prompt, expiry):
        path = [(salt, prompt[:depth]) for depth in range(1, len(prompt) + 1)]
        for block in path:
            self.floors[block] = self.floors.get(block, -inf) if block in self.blocks else -inf
            self.blocks[block] = expiry
        for block in reversed(path):
            if len(self.below(block)) == 1:
                self.floors[block] = -inf
            self.blocks[block] = max(expiry, self.floors[block])
            above = (salt, block[1][:-1])
            if above in self.blocks:
                self.floors[above] = max(self.floors[above], self.blocks[block])

    def below(self, block):
        salt, path = block
        return [one for one in self.blocks if one[0] == salt and one[1][: len(path)] == path]

    def victims(self, salt, incoming, now):
        """Blocks that may be evicted now: leaves of the first class that has one."""
        held = {s: sum(one[0] == s for one in self.blocks) for s in (1, 2, 3)}
        leaves = [block for block in self.blocks if len(self.below(block)) == 1]
        expired = [block for block in leaves if self.blocks[block] <= now]
        if expired:
            return expired
        own = [block for block in leaves if block[0] == salt]
        if own and held[salt] + incoming > self.quotas.get(salt, 1 << 30):
            return own
        above = [block for block in leaves if held[block[0]] > self.quotas.get(block[0], 1 << 30)]
        return above or leaves


def committed(tree, salt, prompt):
    path = Path(1, bytes([salt]) * 32)
    path.salt = salt
    path.extend(list(prompt))
    run, _ = tree.pin(path)
    return path, run


def forget(tree, salt):
    """Blocks freed by a whole clear of a salt."""
    found, over = [], not tree.begin_forget(salt)
    tree.check()
    while not over:
        over, freed, _ = tree.forget_step(1)
        found += freed
        tree.check()
    return found


@settings(max_examples=150, deadline=None)
@given(STEPS)
@example(
    [
        ("quota", (1, 0)),
        ("use", (2, (0, 1, 2), 0, inf)),
        ("use", (2, (0,), 0, 3.0)),
        ("evict", (0, 0, 0.0)),
        ("evict", (0, 0, 0.0)),
        ("use", (1, (0,), 0, inf)),
        ("evict", (0, 0, 5.0)),
    ]
)
def test_every_victim_is_allowed_and_the_counts_agree(steps):
    tree, model, free = BlockTree(1, 8), Model(), list(range(64))
    tree.share()
    for kind, given_values in steps:
        if kind == "use":
            salt, prompt, priority, expiry = given_values
            path, run = committed(tree, salt, prompt)
            assert run == sum((salt, prompt[:n]) in model.blocks for n in range(1, len(prompt) + 1))
            if len(prompt) > run:
                path.assign(run, [free.pop() for _ in range(len(prompt) - run)])
            tree.commit(path, len(prompt))
            tree.hint(path, priority, expiry)
            free += tree.release(path)
            model.use(salt, prompt, expiry)
        elif kind == "evict":
            salt, incoming, now = given_values
            allowed = model.victims(salt, incoming, now)
            nodes, *_, traits, _ = tree.evict(1, True, salt, incoming, now)
            assert len(nodes) == bool(allowed)
            if allowed:
                _, tokens, _ = tree.contents(nodes)
                token = int.from_bytes(tokens, "little")
                chosen = [b for b in allowed if b[0] == traits[0][0] and b[1][-1] == token]
                assert len(chosen) == 1
                del model.blocks[chosen[0]]
                free += tree.finish_offload(nodes, b"\0")[0]
        elif kind == "quota":
            model.quotas[given_values[0]] = given_values[1]
            tree.set_quota(*given_values)
        else:
            freed = forget(tree, given_values)
            gone = [block for block in model.blocks if block[0] == given_values]
            assert len(freed) == len(gone)
            free += freed
            for block in gone:
                del model.blocks[block]
        tree.check()
        assert len(free) + len(model.blocks) == 64
        assert {salt: counts[0] for salt, counts in tree.owners().items() if counts[0]} == {
            salt: held
            for salt in (1, 2, 3)
            if (held := sum(block[0] == salt for block in model.blocks))
        }


def test_a_lower_priority_and_the_least_recent_use_come_first():
    tree, free = BlockTree(1, 8), list(range(8))
    for salt, priority in ((1, 0), (2, -1), (3, 1), (4, 0)):
        path, _ = committed(tree, salt, (salt,))
        path.assign(0, [free.pop()])
        tree.commit(path, 1)
        tree.hint(path, priority)
        tree.release(path)
    *_, traits, _ = tree.evict(4)
    assert traits[0] == (2, 1, 4, 3)


def test_a_pin_is_kept_until_it_is_ended():
    tree = BlockTree(1, 8)
    path, _ = committed(tree, 1, (1, 2))
    path.assign(0, [0, 1])
    tree.commit(path, 2)
    assert tree.pin_blocks(path, 2, 1) is None
    nodes = tree.pin_blocks(path, 2, 2)
    tree.release(path)
    assert len(tree.evict(2)[0]) == 0
    assert tree.unpin_blocks(nodes) == []
    assert len(tree.evict(2)[0]) == 2
    tree.check()
