"""The order of eviction by quotas, priorities, times to live and pins, against a plain model, in the
tree of device blocks and in the table of host slots. Blocks here have no others below them: for
those that have, see `tests.support.share_watch`."""

from __future__ import annotations

from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvactors.cpu_evictor.slots import HostShares, HostTier, SlotState
from kvactors.native import BlockTree, Path

SALTS = (1, 2, 3)
PIN_LIMIT = 3
BLOCKS = st.tuples(st.sampled_from(SALTS), st.integers(0, 4))
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("use"),
            st.tuples(BLOCKS, st.integers(-2, 2), st.sampled_from([inf, inf, 3.0, 9.0])),
        ),
        st.tuples(st.just("pin"), BLOCKS),
        st.tuples(st.just("unpin"), BLOCKS),
        st.tuples(st.just("quota"), st.tuples(st.sampled_from(SALTS), st.integers(1, 4))),
        st.tuples(
            st.just("evict"),
            st.tuples(
                st.integers(1, 4),
                st.sampled_from(SALTS),
                st.integers(0, 3),
                st.sampled_from([0.0, 5.0, 10.0]),
            ),
        ),
    ),
    max_size=40,
)
Block = tuple[int, int]


class Model:
    """blocks: [priority, expiry, last use] by salt and token."""

    def __init__(self) -> None:
        self.blocks: dict[Block, list[float]] = {}
        self.pinned: set[Block] = set()
        self.quotas: dict[int, int] = {}
        self.clock = 0

    def use(self, block: Block, priority: float, expiry: float) -> None:
        self.clock += 1
        self.blocks[block] = [priority, expiry, self.clock]

    def first(self, salt: int, incoming: int, now: float) -> list[Block]:
        """The blocks of which one is evicted next, for blocks of a salt that become resident."""
        free = [block for block in self.blocks if block not in self.pinned]
        expired = [block for block in free if self.blocks[block][1] <= now]
        if expired:
            soonest = min(self.blocks[block][1] for block in expired)
            return [block for block in expired if self.blocks[block][1] == soonest]
        held = {one: sum(block[0] == one for block in self.blocks) for one in SALTS}
        above = {block[0] for block in free if held[block[0]] > self.quotas.get(block[0], 99)}
        if held[salt] + incoming > self.quotas.get(salt, 99) and any(b[0] == salt for b in free):
            above = {salt}
        if above:
            return [self.least([b for b in free if b[0] == one]) for one in above]
        return [self.least(free)] if free else []

    def least(self, blocks: list[Block]) -> Block:
        """Of the lowest priority the least recently used."""
        return min(blocks, key=lambda block: (self.blocks[block][0], self.blocks[block][2]))


def path_of(block: Block) -> Path:
    path = Path(1, bytes([block[0]]) * 32)
    path.salt = block[0]
    path.extend([block[1]])
    return path


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_device_blocks_leave_in_the_order_of_the_model(steps):
    tree, model, free = BlockTree(1, 8), Model(), list(range(32))
    tree.share()
    nodes: dict[Block, object] = {}

    def use(block, priority, expiry, *, pin=False):
        path = path_of(block)
        run, _ = tree.pin(path)
        assert run == (block in model.blocks)
        if not run:
            path.assign(0, [free.pop()])
        tree.commit(path, 1)
        tree.hint(path, priority, expiry)
        if pin:
            found = tree.pin_blocks(path, 1, PIN_LIMIT)
            assert (found is not None) == (len(model.pinned) < PIN_LIMIT)
            if found is not None:
                nodes[block] = found
                model.pinned.add(block)
        free.extend(tree.release(path))
        model.use(block, priority, expiry)

    for kind, values in steps:
        if kind == "use":
            use(*values)
        elif kind == "pin" and values not in model.pinned:
            use(values, 0, inf, pin=True)
        elif kind == "unpin" and values in model.pinned:
            free.extend(tree.unpin_blocks(nodes.pop(values)))
            model.pinned.discard(values)
            model.clock += 1
            model.blocks[values][2] = model.clock
        elif kind == "quota":
            model.quotas[values[0]] = values[1]
            tree.set_quota(*values)
        elif kind == "evict":
            count, salt, incoming, now = values
            found, *_, traits, _ = tree.evict(count, True, salt, incoming, now)
            tokens = tree.contents(found)[1] if len(found) else b""
            left = [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]
            victims = list(zip(traits[0], left, strict=True))
            assert len(victims) == min(count, len(model.blocks) - len(model.pinned))
            for victim in victims:
                assert victim in model.first(salt, incoming, now)
                del model.blocks[victim]
            if victims:
                free.extend(tree.finish_offload(found, bytes(len(found)))[0])
        tree.check()
        assert tree.pinned == len(model.pinned) <= PIN_LIMIT


@settings(max_examples=150, deadline=None)
@given(STEPS)
@example([("use", ((1, 0), 0, inf)), ("pin", (1, 0)), ("evict", (1, 1, 0, 0.0))])
def test_host_blocks_leave_in_the_order_of_the_model(steps):
    model, time = Model(), [0.0]
    shares = HostShares(pin_limit=PIN_LIMIT, clock=lambda: time[0])
    tier = HostTier(16, 16, shares=shares)

    def hash_of(block):
        return bytes([block[0], block[1]]) * 16

    for kind, values in steps:
        if kind == "use":
            block, priority, expiry = values
            if block in model.blocks:
                tier.touch([hash_of(block)])
                model.use(block, *model.blocks[block][:2])
            else:
                made = tier.add(
                    hash_of(block),
                    b"root" * 8,
                    SlotState.RESIDENT,
                    None,
                    (block[0], priority, expiry),
                )
                tier.land([made], frozenset())
                model.use(block, priority, expiry)
        elif kind == "pin" and values in model.blocks and values not in model.pinned:
            shares.pin(hash_of(values))
            if len(model.pinned) < PIN_LIMIT:
                model.pinned.add(values)
        elif kind == "unpin" and values in model.pinned:
            shares.unpin(hash_of(values))
            model.pinned.discard(values)
        elif kind == "quota":
            model.quotas[values[0]] = values[1]
            shares.set_quota(values[0], values[1], tier.candidates(), named=True)
        elif kind == "evict":
            count, salt, incoming, time[0] = values
            found = tier.victims(count, (), {salt: incoming})
            assert len(found) == min(count, len(model.blocks) - len(model.pinned))
            for victim in found:
                block = (victim.hash[0], victim.hash[1])
                assert block in model.first(salt, incoming, time[0])
                del model.blocks[block]
                tier.drop(victim)
        tier.check()
        assert shares.pinned == len(model.pinned)


def test_a_quota_evicts_no_more_than_the_blocks_beyond_it():
    """A block that comes before its child by priority does not follow it beyond the quota."""
    tier = HostTier(8, 8, shares=HostShares(named={1: 1}))
    above, below, other = (bytes([number]) * 32 for number in (1, 2, 3))
    for block_hash, parent, traits in (
        (above, b"root" * 8, (1, 0, inf)),
        (below, above, (1, 1, inf)),
        (other, b"root" * 8, (2, -1, inf)),
    ):
        made = tier.add(block_hash, parent, SlotState.RESIDENT, None, traits)
        tier.land([made], frozenset())
    assert [block.hash for block in tier.victims(2)] == [below, other]
    assert [block.hash for block in tier.victims(3)] == [below, other, above]


def test_a_path_beyond_the_share_of_pins_is_refused_as_a_whole():
    shares = HostShares(pin_limit=PIN_LIMIT)
    hashes = [bytes([number]) * 32 for number in range(4)]
    shares.pin(b"".join(hashes))
    assert (shares.pinned, shares.pins_refused) == (0, 1)
    shares.pin(b"".join(hashes[:3]))
    assert (shares.pinned, shares.pins_refused) == (3, 1)


def test_host_blocks_whose_time_is_over_leave_before_a_lower_priority():
    tier = HostTier(8, 8, shares=HostShares(clock=lambda: 5.0))
    for number, traits in ((1, (1, -2, inf)), (2, (1, 2, 4.0)), (3, (1, -1, 6.0))):
        made = tier.add(bytes([number]) * 32, b"root" * 8, SlotState.RESIDENT, None, traits)
        tier.land([made], frozenset())
    assert [block.hash[0] for block in tier.victims(3)] == [2, 1, 3]


def test_a_run_that_two_pins_share_stays_until_both_have_ended():
    shares = HostShares(pin_limit=4)
    hashes = [bytes([number]) * 32 for number in range(4)]
    first, second = b"".join(hashes[:2]), b"".join(hashes[2:])
    for run in (first, second, first):
        shares.pin(run)
    shares.unpin(first)
    shares.unpin(second)
    assert [shares.is_pinned(one) for one in hashes] == [True, True, False, False]
    shares.unpin(first)
    shares.unpin(first)
    assert shares.pinned == 0
