"""The clear of a salt in steps, with requests, evictions and other clears between them, against a
plain account of device blocks and of the messages to an index."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.native import BlockTree, Path

BLOCKS = 48
PROMPTS = [(0,), (0, 1), (0, 1, 2, 3, 4), (0, 1, 5, 6), (7, 8, 9)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 2), st.sampled_from(PROMPTS)),
        st.tuples(st.just("release"), st.integers(0, 5), st.none()),
        st.tuples(st.just("evict"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("offloaded"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("clear"), st.integers(0, 2), st.none()),
        st.tuples(st.just("step"), st.integers(1, 3), st.none()),
        st.tuples(st.just("hosted"), st.integers(0, 2), st.sampled_from(PROMPTS)),
        st.tuples(st.just("retire"), st.just(0), st.none()),
    ),
    max_size=40,
)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


class Machine:
    """A tree with its users. `sent`: the blocks that an index has, by the messages so far."""

    def __init__(self, *, eager: bool) -> None:
        self.tree = BlockTree(1, 4, eager_hashes=eager)
        self.tree.share()
        self.free = list(range(BLOCKS))
        self.paths: list[Path] = []
        self.offloads: list[tuple[object, list[bytes]]] = []
        self.sent: set[bytes] = set()
        self.live: set[tuple[int, tuple[int, ...]]] = set()  # computed since the last clear

    def path(self, salt: int, prompt: tuple[int, ...]) -> Path:
        path = Path(1, bytes([salt]) * 32)
        path.salt = salt
        path.extend(list(prompt))
        return path

    def use(self, salt: int, prompt: tuple[int, ...]) -> None:
        if len(self.free) < len(prompt):
            return
        path = self.path(salt, prompt)
        run, states = self.tree.pin(path)
        assert all((salt, prompt[:n]) in self.live for n in range(1, run + 1)), "cleared, and found"
        self.tree.trim(path, run) if states else None
        new = len(prompt) - run
        if new:
            path.assign(run, [self.free.pop() for _ in range(new)])
        start, stop, _ = self.tree.commit(path, len(prompt))
        self.sent.update(split(path.hashes(start, stop)))
        self.live.update((salt, prompt[:n]) for n in range(1, len(prompt) + 1))
        self.paths.append(path)

    def release(self, which: int) -> None:
        if self.paths:
            path = self.paths.pop(which % len(self.paths))
            self.free += self.tree.release(path)

    def evict(self, count: int) -> None:
        if self.tree.retired:
            return
        nodes, hashes, *_, freed = self.tree.evict(count)
        self.free += freed
        if len(nodes):
            self.offloads.append((nodes, split(hashes)))

    def offloaded(self, which: int, on_host: bool) -> None:
        if not self.offloads:
            return
        nodes, hashes = self.offloads.pop(which % len(self.offloads))
        past = set(self.tree.forgotten(nodes))
        freed, kept = self.tree.finish_offload(nodes, bytes([on_host]) * len(hashes))
        self.free += freed
        gone = {h for i, h in enumerate(hashes) if i not in kept and i not in past}
        self.sent -= gone

    def clear(self, salt: int) -> None:
        self.tree.begin_forget(salt)
        self.live = {one for one in self.live if one[0] != salt}
        for path in self.paths:
            if path.salt == salt:
                assert self.tree.is_forgotten(path) or not path.num_held
        assert self.tree.peek(self.path(salt, PROMPTS[2])) == (0, b"")

    def step(self, count: int) -> bool:
        over, freed, hashes = self.tree.forget_step(count)
        self.free += freed
        self.sent.difference_update(split(hashes))
        return over

    def hosted(self, salt: int, prompt: tuple[int, ...]) -> None:
        known = self.tree.host_blocks_added(self.path(salt, prompt).hashes(0, len(prompt)))
        assert known == 0 or any(one[0] == salt for one in self.live)

    def retire(self) -> None:
        """A clear of everything: what follows is a new tree's."""
        self.finish()
        before, self.tree = self.tree, BlockTree(1, 4)
        before.retire()
        while before.returning:
            self.free += before.sweep(3)
        assert before.forget_step(1)[:2] == (True, [])
        self.tree.share()
        self.sent, self.live = set(), set()

    def finish(self) -> None:
        """End everything that holds blocks. The index has the resident blocks then, and no others."""
        while self.offloads:
            self.offloaded(0, False)
        while self.paths:
            self.release(0)
        while not self.step(2):
            self.tree.check()
        self.tree.check()
        resident = split(self.tree.device_hashes())
        assert set(resident) == self.sent
        assert len(self.free) + len(resident) == BLOCKS == len({*self.free}) + len(resident)


@settings(max_examples=250, deadline=None)
@given(STEPS, st.booleans())
def test_steps_of_a_clear_lose_no_block_and_no_report(steps, eager):
    machine = Machine(eager=eager)
    for kind, number, argument in steps:
        if kind in ("use", "hosted", "offloaded"):
            getattr(machine, kind)(number, argument)
        elif kind == "retire":
            machine.retire()
        else:
            getattr(machine, kind)(number)
        machine.tree.check()
        assert len(set(machine.free)) == len(machine.free)
    machine.finish()


def test_the_first_step_of_a_clear_does_not_go_over_the_blocks():
    machine = Machine(eager=True)
    machine.use(1, tuple(range(40)))
    machine.release(0)
    machine.clear(1)
    assert len(machine.free) == BLOCKS - 40, "the blocks are freed by the steps"
    freed = []
    while not machine.step(4):
        freed.append(len(machine.free) - (BLOCKS - 40))
    assert max(b - a for a, b in pairwise(freed)) <= 4
    assert len(machine.free) == BLOCKS
    machine.finish()
