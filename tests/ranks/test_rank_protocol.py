"""The leader against ranks made by hand: bad hellos, garbage, answers of the wrong length, twice, late, in any order, and two of one number."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvactors.config import RanksConfig
from kvactors.device.host import HostDevice
from kvactors.gpu_swapper.messages import Direction
from kvactors.gpu_swapper.remote import RemoteExecutor
from kvactors.layout import GQALayout
from kvactors.ranks.group import RankGroup
from kvactors.ranks.protocol import MOST_BYTES, VERSION, Answer, Arrived, CopyBlocks, Hello, Refused, StoreObjects, Welcome
from kvactors.ranks.wire import StreamWire, connect
from kvactors.storage.backends.ranks import RankBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate

ENDPOINT = "memory://by-hand"
PRINT = b"f" * 32
A, B, C = (bytes([byte]) * 32 for byte in b"abc")


def hello(rank: int = 0, **over) -> Hello:
    values = {"version": VERSION, "rank": rank, "ranks": 2, "fingerprint": PRINT, "blocks": 8, "slots": 6, "keys": b""}
    return Hello(**{**values, **over})


def group_at(endpoint: str = ENDPOINT, **over) -> RankGroup:
    return RankGroup(RanksConfig(**{"count": 2, "endpoint": endpoint, "timeout": 0.3, "start": 5.0, **over}), PRINT, 8, 6)


async def come(rank: int, **over):
    """A rank by hand, admitted."""
    wire = await connect(ENDPOINT)
    wire.send(hello(rank, **over))
    assert isinstance(await wire.receive(), Welcome)
    return wire


@asynccontextmanager
async def opened(*keys: bytes):
    """A group with its two ranks, and a store as it sees theirs."""
    group = group_at()
    store = RankBackend(group, PRINT, 64, 1.0, exclusive=False)
    opening = asyncio.ensure_future(group.open())
    await settle()
    wires = [await come(rank, keys=(*keys, b"", b"")[rank]) for rank in range(2)]
    await opening
    try:
        yield group, store, wires
    finally:
        await group.close()


def simulated(main):
    def test() -> None:
        simulate(main)

    test.__name__ = main.__name__
    return test


def copy(op: int) -> CopyBlocks:
    return CopyBlocks(op, True, (1, 2), (3, 4), True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# -- hellos


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"version": VERSION + 1}, "protocol version: 2, not 1"),
        ({"ranks": 4}, "rank count: 4, not 2"),
        ({"fingerprint": b""}, "layout: another one"),
        ({"blocks": 9}, "device blocks: 9, not 8"),
        ({"slots": 0}, "host slots: 0, not 6"),
        ({"rank": 2}, "no rank 2 of 2"),
        ({"rank": -1}, "no rank -1 of 2"),
        ({"rank": 1 << 62}, "no rank"),
        ({"keys": b"x" * 33}, "names of another length"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(over, word):
    async def main() -> None:
        async with opened() as (group, _, _):
            wire = await connect(ENDPOINT)
            wire.send(hello(**over))
            answer = await wire.receive()
            assert isinstance(answer, Refused)
            assert word in answer.reason
            wire.close()
            assert group.healthy

    simulate(main)


@simulated
async def test_whoever_says_nothing_or_something_else_is_hung_up_on():
    async with opened() as (group, _, _):
        silent, odd = await connect(ENDPOINT), await connect(ENDPOINT)
        odd.send(Answer(1))
        assert await odd.receive() is None
        assert await silent.receive() is None
        assert asyncio.get_running_loop().time() >= 5.0
        assert group.healthy


@simulated
async def test_a_rank_that_says_what_no_rank_says_is_lost():
    async with opened() as (group, _, wires):
        wires[0].send(Welcome())
        assert await wires[0].receive() is None
        assert [rank.health for rank in group.statistics()] == ["away", "healthy"]
        assert await group.scatter(copy) == [None, None]
        assert group.statistics()[1].operations == 0
        await come(0)
        assert group.healthy


@simulated
async def test_the_second_of_one_number_takes_the_place_of_the_first():
    async with opened() as (group, _, wires):
        heard = []
        group.changed = lambda rank, health: heard.append((rank, health.value))
        asked = asyncio.ensure_future(group.scatter(copy))
        first = await wires[0].receive()
        wires[1].send(Answer((await wires[1].receive()).op, bytes(2)))
        second = await come(0)
        assert await wires[0].receive() is None
        assert await asked == [None, Answer(first.op, bytes(2))]
        assert heard == [(0, "away"), (0, "healthy")]
        wires[0].send(Answer(first.op, bytes(2)))  # to nobody
        second.send(Answer(first.op, bytes(2)))  # the other's
        await settle()
        assert group.healthy
        assert [rank.losses for rank in group.statistics()] == [1, 0]


# -- answers


@simulated
async def test_answers_in_any_order_twice_and_to_nothing():
    async with opened() as (group, _, wires):
        asked = [asyncio.ensure_future(group.scatter(copy)) for _ in range(3)]
        await settle()
        ops = sorted([(await wires[0].receive()).op for _ in asked])
        for wire in wires:
            for op in reversed(ops):
                wire.send(Answer(op, bytes([0, op])))
                await settle()
                wire.send(Answer(op, bytes([9, 9])))
            wire.send(Answer(1 << 40))
            wire.send(Arrived(1 << 40, 1))
        answers = [await task for task in asked]
        assert sorted(answers, key=lambda both: both[0].op) == [[Answer(op, bytes([0, op]))] * 2 for op in ops]
        assert all(rank.in_flight == 0 and rank.health == "healthy" for rank in group.statistics())


@simulated
async def test_copies_whose_answer_has_another_length_did_not_happen():
    async with opened() as (group, _, wires):
        executor = RemoteExecutor(HostDevice(GQALayout(1, 1, 4, 4, dtype="uint8"), 8), None, group)
        for outcomes, failed in ((b"", (0, 1)), (bytes(3), (0, 1)), (b"\0\7", (1,)), (bytes(2), ())):
            run = asyncio.ensure_future(executor.run(Direction.TO_DEVICE, [1, 2], [3, 4]))
            for wire, said in zip(wires, (bytes(2), outcomes), strict=True):
                wire.send(Answer((await wire.receive()).op, said))
            assert await run == failed
        assert group.healthy


@simulated
async def test_layers_count_when_every_rank_has_them_and_never_go_back():
    async with opened() as (group, _, wires):
        reported = []
        asked = asyncio.ensure_future(group.scatter(copy, reported.append))
        ops = [(await wire.receive()).op for wire in wires]
        for which, layers in ((0, 3), (1, 1), (1, 1), (1, 2), (0, 1), (1, 5), (0, 4)):
            wires[which].send(Arrived(ops[which], layers))
            await settle()
        assert reported == [1, 2, 3, 4]
        for wire, op in zip(wires, ops, strict=True):
            wire.send(Answer(op, bytes(2)))
            wire.send(Arrived(op, 9))  # too late
        await asked
        await settle()
        assert reported == [1, 2, 3, 4]


@simulated
async def test_a_rank_is_silent_until_it_has_answered_all_it_owes():
    async with opened() as (group, _, wires):
        asked = [asyncio.ensure_future(group.scatter(copy)) for _ in range(2)]
        await settle()
        ops = [(await wires[0].receive()).op for _ in asked]
        for _ in asked:
            wires[1].send(Answer((await wires[1].receive()).op, bytes(2)))
        await asyncio.sleep(1.0)
        assert [rank.health for rank in group.statistics()] == ["silent", "healthy"]
        assert await group.scatter(copy) == [None, None]
        wires[0].send(Answer(ops[0], bytes(2)))
        await settle()
        assert not group.healthy
        wires[0].send(Answer(ops[1], bytes(2)))
        await settle()
        assert group.healthy
        answers = [await task for task in asked]
        assert {answer.op for both in answers for answer in both} == set(ops)
        assert group.statistics()[0].silences == 1


@simulated
async def test_what_is_cancelled_still_waits_for_every_rank():
    async with opened() as (group, _, wires):
        asked = asyncio.ensure_future(group.scatter(copy))
        await settle()
        asked.cancel()
        wires[0].send(Answer((await wires[0].receive()).op, bytes(2)))
        await asyncio.sleep(5.0)
        assert not asked.done()
        wires[1].send(Answer((await wires[1].receive()).op, bytes(2)))
        await asyncio.wait((asked,))
        assert asked.cancelled()
        assert group.healthy


# -- stores


@simulated
async def test_a_store_holds_what_all_ranks_hold_and_forgets_what_one_of_them_lost():
    async with opened(A + B, B + C + A) as (group, store, wires):
        assert set(store.keys()) == {A, B}
        wires[0].close()
        await settle()
        assert store.probe([A, B]) == 0
        await come(0, keys=A + C)
        assert group.healthy
        assert store.keys() == [A]
        assert store.lost() == [B]
        assert store.probe([A]) == 1


@pytest.mark.parametrize("outcomes", [b"", bytes(2), b"\xff", bytes([len(Outcome)])])
def test_a_store_whose_answer_makes_no_sense_was_not_available(outcomes):
    async def main() -> None:
        async with opened(A, A) as (group, store, wires):
            reading = asyncio.ensure_future(store.read_slots([A], None, [0], lambda: False))
            for wire, said in zip(wires, (outcomes, bytes(1)), strict=True):
                message = await wire.receive()
                assert isinstance(message, StoreObjects)
                wire.send(Answer(message.op, said, b"x" * 31))  # and a name of another length
            assert await reading == (bytes([Outcome.UNAVAILABLE]), [])
            assert store.keys() == [A]
            assert group.healthy

    simulate(main)


# -- sockets


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


GARBAGE = {
    "cut off": b"\x01\x00",
    "empty": framed(b""),
    "noise": framed(bytes(range(256))),
    "huge": (MOST_BYTES + 1).to_bytes(4, "little") + b"x",
    "no map": framed(b"\x91" * 50),
    "unknown": framed(msgspec.msgpack.encode({"t": "nobody"})),
    "wrong types": framed(msgspec.msgpack.encode({"t": "hello", "version": "1"})),
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_on_the_socket_ends_its_connection_alone(tmp_path, data):
    path = tmp_path / "ranks"
    group = group_at(f"unix://{path}")
    opening = asyncio.ensure_future(group.open())
    while not path.exists():
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    wires = []
    for rank in range(2):
        wires.append(await connect(f"unix://{path}"))
        wires[-1].send(hello(rank))
        assert isinstance(await wires[-1].receive(), Welcome)
    await opening
    assert isinstance(wires[0], StreamWire)
    wires[0]._writer.write(data)
    wires[0]._writer.write_eof()
    assert await wires[0].receive() is None
    assert [rank.health for rank in group.statistics()] == ["away", "healthy"]
    await group.close()
    for wire in wires:
        wire.close()
