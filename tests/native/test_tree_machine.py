"""The native tree against its twin: every operation on both, every result compared, no device block
lost or freed twice."""

from __future__ import annotations

from random import Random

import pytest

from tests.native.tree_machine import EXTRAS, MAX_BLOCKS, MAX_PATHS, REACHED, ROOTS, TreeMachine

BOTH = ("pin", "trim", "retreat", "truncate", "release", "commit", "begin_load")
BOTH += ("mark_announced", "worth_saving", "pin_resident", "commit_tokens", "end")
BOTH += ("drop_leading", "probe")
WANTED = [f"{name} {how}" for name in BOTH for how in ("answered", "refused")]
WANTED += ["pin_resident grants", "pin_resident declines", "commit_tokens commits"]
WANTED += ["commit_tokens declines", "end declines", "evicted", "eviction overtaken by a match"]
WANTED += ["replace refused", "dismantle", "keep of a block that leaves before others"]
WANTED += ["drop of a block that another path loads"]


class Walk:
    """A long seeded walk through the same machine: deeper states than short examples reach."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = TreeMachine()
        size, capacity = self.random.choice([1, 2, 3]), self.random.choice([0, 100])
        self.machine.start(size, capacity, seed % 3 == 0, flat=seed % 2 == 0)

    def kinds(self) -> list[int]:
        if self.machine.flat:
            return self.random.sample(range(MAX_BLOCKS + 2), k=self.random.randint(1, MAX_BLOCKS))
        return self.random.choices([0, 1], [4, 1], k=self.random.randint(1, MAX_BLOCKS))

    def image(self) -> int:
        return self.random.choice([0, 0, 0, 1, 2])

    def less(self) -> int:
        return self.random.choice([-1, 0, 0, 0, 1, 2])

    def arrive(self) -> None:
        number, machine = self.random.randrange, self.machine
        if len(machine.leases) == MAX_PATHS:
            return
        if number(2):
            machine.whole_request(self.kinds(), self.image())
        elif number(2):
            machine.request_in_one_step(
                self.kinds(),
                number(3),
                -1,
                self.random.choice([0, 0, 0, 1]),
                self.random.choice([-1, 0, 1, MAX_BLOCKS, MAX_BLOCKS, MAX_BLOCKS]),
                number(2) == 0,
                number(8) == 0,
                self.random.choice(["ended", "stays"]),
            )
        else:
            root = ROOTS[number(5) == 0]
            machine.new_path(root, self.kinds(), number(3) > 1, number(3), self.image())
            machine.evict(number(3), 0, number(2) > 0)
            machine.pin_without_a_use(-1, -1, self.random.choice(["granted", "waits", "refused"]))

    def use_path(self) -> None:
        number, machine, index = (
            self.random.randrange,
            self.machine,
            self.random.randrange(MAX_PATHS),
        )
        if not machine.leases:
            return
        moves = [
            lambda: machine.extend(index, number(2), number(5)),
            lambda: machine.set_extra(index, number(3), self.random.choice(EXTRAS)),
            lambda: machine.name_blocks(index, number(3), number(MAX_BLOCKS)),
            lambda: machine.provide(index, number(MAX_BLOCKS)),
            lambda: machine.assign_again(index, number(MAX_BLOCKS + 3)),
            lambda: machine.replace(index, number(MAX_BLOCKS)),
            lambda: machine.pin(index, number(MAX_BLOCKS + 2) - 1),
            lambda: machine.pin_without_a_use(
                index,
                number(MAX_BLOCKS + 2) - 1,
                self.random.choice(["granted", "waits", "refused"]),
            ),
            lambda: machine.peek(index, number(MAX_BLOCKS + 2) - 1),
            lambda: machine.trim(index, self.less()),
            lambda: machine.mark_announced(index, number(MAX_BLOCKS), self.less()),
            lambda: machine.worth_saving(index, number(MAX_BLOCKS), self.less(), number(4)),
            lambda: machine.commit(index, self.less(), number(4) > 0),
            lambda: machine.begin_load(
                index,
                number(MAX_BLOCKS),
                number(MAX_BLOCKS) + 1,
                self.random.choice(["held", "held", "committed", "any"]),
                number(4) - 1,
            ),
            lambda: machine.hint(index, number(MAX_BLOCKS), number(2) > 0, number(4)),
            lambda: machine.use_of_another_tree(index),
            lambda: machine.release(index, number(2) > 0),
            lambda: machine.retreat(index, self.less()),
            lambda: machine.truncate(index, number(5) - 1, self.random.choice([*EXTRAS, b""])),
            lambda: machine.pin_resident(
                index,
                number(MAX_BLOCKS + 2) - 1,
                self.random.choice([0, 0, 0, 1, 3]),
                self.random.choice([-1, 0, 1, MAX_BLOCKS, MAX_BLOCKS]),
                number(2) == 0,
                number(4) == 0,
            ),
            lambda: machine.commit_tokens(index, number(7) - 2, number(3) == 0),
            lambda: machine.end_in_one_step(index),
            lambda: machine.drop_leading(index, number(4)),
            lambda: machine.probe(index, number(MAX_BLOCKS), number(MAX_BLOCKS + 2)),
            lambda: len(machine.leases) < MAX_PATHS and machine.fork(index),
        ]
        weights = [2, 1, 1, 1, 1, 1, 3, 2, 1, 1, 2, 2, 4, 6, 2, 1, 4, 1, 2, 3, 3, 2, 3, 1, 1]
        self.random.choices(moves, weights)[0]()

    def tiers(self) -> None:
        number, machine = self.random.randrange, self.machine
        chance = number(24)
        if chance < 6:
            machine.evict(number(5), 0 if number(4) else number(4), number(2) > 0)
        elif chance < 11 and machine.offloads:
            machine.finish_offload(number(20), number(256))
        elif chance < 16 and machine.loads:
            machine.finish_load(number(20), number(MAX_BLOCKS), number(2) > 0)
        elif chance == 16:
            machine.drop(number(4), number(3), number(2) == 0)
        elif chance < 18:
            machine.evict_at_once(number(8) + 1, self.random.choice([255, 255, 15, 0]))
        elif chance == 18:
            machine.clear_host(number(3))
        elif chance == 19:
            machine.retire(number(3))
        elif chance < 23:
            machine.sweep(number(4), number(4))
        else:
            machine.dismantle(number(4))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            moves = [self.arrive, self.use_path, self.tiers, self.machine.ask_for_hashes]
            self.random.choices(moves, [20, 50, 30, 5])[0]()
            self.machine.alike()
        self.machine.teardown()


def test_long_walks_agree_and_meet_every_situation() -> None:
    REACHED.clear()
    for seed in range(120):
        try:
            Walk(seed).run(250)
        except Exception as error:
            error.add_note(f"walk with seed {seed}")
            raise
    assert [name for name in WANTED if not REACHED[name]] == []


@pytest.mark.parametrize("capacity", [0, 64])
def test_long_chains(capacity: int) -> None:
    """A match, a use and a release handle the nodes of a chain together, over groups of nodes and
    chunks of memory (256 nodes of a tree without a capacity), in runs that end within them."""
    for seed in range(6):
        random, machine = Random(seed), TreeMachine()
        machine.start(1, capacity, seed % 3 == 0)

        def prompt(random: Random = random) -> list[int]:
            """The beginning of one of three chains, and a branch of it."""
            first, branch = 1000 * random.randrange(3), 100 * random.randrange(4)
            chain = range(first, first + random.choice([1, 5, 40, 300]))
            return [*chain, *range(branch, branch + random.randrange(24))]

        for _ in range(25):
            kind = random.randrange(5)
            if kind == 0 and machine.leases:
                machine.release(random.randrange(MAX_PATHS), True)
            elif kind == 1 and len(machine.leases) < MAX_PATHS - 1:
                machine.new_path(ROOTS[0], prompt(), True, 0, 0)
                machine.commit(len(machine.leases) - 1, 0, True)
            elif kind == 2:
                machine.evict(random.randint(1, 64), 0, random.random() < 0.5)
                machine.whole_request(prompt(), 0)
                if machine.offloads:
                    machine.finish_offload(0, random.randrange(256))
            else:
                machine.whole_request(prompt(), 0)
            machine.alike()
        machine.teardown()
