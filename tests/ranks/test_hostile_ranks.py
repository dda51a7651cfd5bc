"""Random bytes and random messages from an authenticated rank: its connection ends, nothing else
does, no operation hangs, and no false answer counts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks import protocol
from kvactors.data_plane.ranks.connection import MemoryConnection, _decoder
from kvactors.data_plane.ranks.plane import RanksPlane
from kvactors.data_plane.ranks.protocol import Frame, RankAnswer
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from tests.ranks.manual import A, B, come, opened, settle

FRAMES = [
    kind
    for kind in vars(protocol).values()
    if isinstance(kind, type) and issubclass(kind, Frame) and kind is not Frame
]
ANSWERS = st.builds(
    RankAnswer,
    st.integers(0, 4),
    st.binary(max_size=4),
    st.sampled_from([b"", A, B, A + B, b"x" * 31, b"y" * 64]),
)


def encodable(message: Frame) -> bool:
    try:
        return bool(msgspec.msgpack.encode(message))
    except OverflowError:
        return False


MESSAGES = st.one_of(ANSWERS, *(st.from_type(kind).filter(encodable) for kind in FRAMES))


@given(
    st.binary(max_size=200)
    | ANSWERS.map(msgspec.msgpack.encode)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.binary(max_size=8)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["t", "op", "outcomes", "keys"]) | st.text(max_size=3), inner
            )
        ),
        max_leaves=8,
    ).map(msgspec.msgpack.encode)
)
def test_all_received_bytes_are_a_message_or_end_the_connection(body):
    async def main() -> None:
        ours, theirs = MemoryConnection.pair()
        ours._inbox.put_nowait(body)
        message = await ours.receive()
        assert message is None or isinstance(message, Frame)
        assert message is not None or ours.violation
        theirs.close()

    simulate(main)


def test_a_deeply_nested_message_ends_the_connection():
    async def main() -> None:
        ours, _ = MemoryConnection.pair()
        ours._inbox.put_nowait(b"\x91" * 100_000)
        assert await ours.receive() is None
        assert ours.violation

    simulate(main)


@pytest.mark.parametrize("count", [-1, (1 << 32) + 1])
def test_a_count_that_cannot_be_is_no_message(count):
    sent = msgspec.msgpack.encode(RankAnswer(1, b"\0", without_checksum=count))
    with pytest.raises(msgspec.ValidationError):
        _decoder.decode(sent)


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_random_messages_of_a_rank_harm_only_its_connection(messages):
    """Copies, reads and writes are open while rank 0 sends anything. Then it is replaced by a
    correct one."""

    async def main() -> None:
        async with opened(A, A) as (group, store, wires):
            plane = RanksPlane(group, None, None, store_timeout=1.0)
            work = [
                asyncio.ensure_future(plane.copy_pairs(Direction.TO_DEVICE, [1, 2], [3, 4])),
                asyncio.ensure_future(store.read([A], SlotViews(None, [0]), lambda: False)),
                asyncio.ensure_future(store.write([B], SlotViews(None, [1]), lambda: False)),
            ]
            await settle()
            for message in messages:
                wires[0].send(message)
            await settle()
            before = dict(group._ranks[0].open)
            wires[0].close()
            for _ in range(3):
                message = await wires[1].receive()
                wires[1].send(
                    RankAnswer(
                        message.op, bytes(2 if isinstance(message, protocol.CopyBlocks) else 1)
                    )
                )
            await come(0, A)
            failed, read, written = await asyncio.gather(*work)
            assert set(failed) <= {0, 1}
            assert len(read.outcomes) == len(written.outcomes) == 1
            assert max(read.outcomes + written.outcomes) < len(Outcome)
            open_copies = [operation for operation in before.values() if operation.outcomes == 2]
            if open_copies:
                assert failed == (0, 1), "a copy without a proper answer did not happen"
            assert set(store.keys()) <= {A, B}
            assert group.healthy

    simulate(main)
