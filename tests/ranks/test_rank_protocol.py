"""The leader against ranks made by hand: identities that do not fit, garbage, answers of the wrong
length, twice, late, in any order, and two ranks of one number."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks.connection import StreamConnection, connect
from kvactors.data_plane.ranks.plane import RanksPlane
from kvactors.data_plane.ranks.protocol import (
    FROM_RANK_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Arrived,
    Hello,
    Ping,
    Pong,
    RankAnswer,
    Refused,
    StoreObjects,
    Welcome,
)
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from tests.ranks.manual import (
    ENDPOINT,
    A,
    B,
    C,
    authenticated,
    come,
    copy,
    group_at,
    identity,
    opened,
    settle,
    simulated,
)

# -- identities


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"ranks": 4}, "has rank count 4, the leader has 2"),
        ({"model": "model-b"}, "has model 'model-b', the leader has 'model-a'"),
        ({"namespace": "other"}, "has storage namespace 'other', the leader has 'default'"),
        ({"storage": "file"}, "has storage back end 'file', the leader has 'none'"),
        (
            {"fingerprint": b"g" * 32},
            "has layout or storage.head_ranges '6767676767676767', the leader has '6666666666666666'",
        ),
        ({"blocks": 9}, "has device blocks 9, the leader has 8"),
        ({"slots": 0}, "has host slots 0, the leader has 6"),
        ({"rank": 2}, "no rank 2 of 2"),
        ({"rank": -1}, "no rank -1 of 2"),
        ({"rank": 1 << 62}, "no rank"),
        ({"objects": -1}, "has -1 stored objects"),
        ({"objects": 1 << 40}, "has 1099511627776 stored objects, at most"),
    ],
)
def test_an_identity_that_does_not_fit_is_refused_with_both_values(over, word):
    async def main() -> None:
        async with opened() as (group, _, _):
            wire = await authenticated()
            wire.send(identity(**over))
            answer = await wire.receive()
            assert isinstance(answer, Refused)
            assert word in answer.reason
            wire.close()
            assert group.healthy

    simulate(main)


@simulated
async def test_another_protocol_version_is_refused_with_both_versions():
    async with opened() as (group, _, _):
        wire = await connect(ENDPOINT)
        wire.send(Hello(VERSION - 1))
        answer = await wire.receive()
        assert isinstance(answer, Refused)
        assert (
            answer.reason == f"protocol version {VERSION - 1} of the rank, {VERSION} of the leader"
        )
        assert group.healthy


@simulated
async def test_connections_that_send_nothing_or_something_else_are_closed():
    async with opened() as (group, _, _):
        silent, odd = await connect(ENDPOINT), await connect(ENDPOINT)
        odd.send(RankAnswer(1))
        await asyncio.sleep(20.0)
        assert await odd.receive() is None
        assert await silent.receive() is None
        assert group.healthy
        assert group.refused == {"not authenticated": 2}


@simulated
async def test_a_rank_that_sends_an_unexpected_message_is_lost():
    async with opened() as (group, _, wires):
        wires[0].send(Welcome())
        assert await wires[0].receive() is None
        assert [rank.health for rank in group.statistics()] == ["away", "healthy"]
        assert [rank.violations for rank in group.statistics()] == [1, 0]
        assert "unexpected message Welcome" in group.statistics()[0].reason
        assert await group.scatter(copy, outcomes=2) == [None, None]
        assert group.statistics()[1].operations == 0
        await come(0)
        assert group.healthy
        assert group.statistics()[0].reason == ""


@simulated
async def test_a_second_process_of_one_number_is_refused_while_the_first_answers():
    async with opened() as (group, _, wires):
        second = await authenticated()
        second.send(identity(0))
        assert isinstance(await wires[0].receive(), Ping)
        wires[0].send(Pong())
        answer = await second.receive()
        assert isinstance(answer, Refused)
        assert "rank 0 is served by another process" in answer.reason
        assert group.healthy
        assert [rank.losses for rank in group.statistics()] == [0, 0]


@simulated
async def test_a_second_process_of_one_number_replaces_a_first_that_does_not_answer():
    async with opened() as (group, _, wires):
        heard = []
        group.changed = lambda rank, health: heard.append((rank, health.value))
        asked = asyncio.ensure_future(group.scatter(copy, outcomes=2))
        first = await wires[0].receive()
        wires[1].send(RankAnswer((await wires[1].receive()).op, bytes(2)))
        await come(0)
        assert isinstance(await wires[0].receive(), Ping)
        assert await wires[0].receive() is None
        assert await asked == [None, RankAnswer(first.op, bytes(2))]
        assert heard == [(0, "silent"), (0, "away"), (0, "healthy")]
        wires[0].send(RankAnswer(first.op, bytes(2)))  # on a closed connection
        await settle()
        assert group.healthy
        assert [rank.losses for rank in group.statistics()] == [1, 0]


# -- answers


@simulated
async def test_answers_in_any_order():
    async with opened() as (group, _, wires):
        asked = [
            asyncio.ensure_future(group.scatter(copy, outcomes=2, worst=255)) for _ in range(3)
        ]
        await settle()
        ops = sorted([(await wires[0].receive()).op for _ in asked])
        for wire in wires:
            for op in reversed(ops):
                wire.send(RankAnswer(op, bytes([0, op])))
                await settle()
            wire.send(Arrived(1 << 40, 1))
        answers = [await task for task in asked]
        assert sorted(answers, key=lambda both: both[0].op) == [
            [RankAnswer(op, bytes([0, op]))] * 2 for op in ops
        ]
        assert all(rank.in_flight == 0 and rank.health == "healthy" for rank in group.statistics())


VIOLATIONS = {
    "no outcomes": (b"", b""),
    "too few outcomes": (bytes(1), b""),
    "too many outcomes": (bytes(3), b""),
    "outcome out of range": (b"\0\2", b""),
    "half a name": (bytes(2), b"x" * 31),
}


@pytest.mark.parametrize("answer", VIOLATIONS.values(), ids=VIOLATIONS)
def test_an_answer_that_cannot_be_costs_the_connection_and_no_bytes(answer):
    async def main() -> None:
        async with opened() as (group, _, wires):
            plane = RanksPlane(group, None, None, store_timeout=1.0)
            run = asyncio.ensure_future(plane.copy_pairs(Direction.TO_DEVICE, [1, 2], [3, 4]))
            for wire, (outcomes, gone) in zip(wires, ((bytes(2), b""), answer), strict=True):
                wire.send(RankAnswer((await wire.receive()).op, outcomes, gone))
            assert await wires[1].receive() is None
            assert not run.done(), (
                "the rank may still write: the operation is open until it is back"
            )
            assert [rank.violations for rank in group.statistics()] == [0, 1]
            await come(1)
            assert await run == (0, 1)
            assert group.healthy

    simulate(main)


@simulated
async def test_an_answer_twice_or_to_nothing_costs_the_connection():
    async with opened() as (group, _, wires):
        asked = asyncio.ensure_future(group.scatter(copy, outcomes=2))
        for wire in wires:
            wire.send(RankAnswer((await wire.receive()).op, bytes(2)))
        first, _ = await asked
        wires[0].send(first)
        assert await wires[0].receive() is None
        assert "not open" in group.statistics()[0].reason


@simulated
async def test_a_rank_that_violates_the_protocol_again_and_again_waits_longer_each_time():
    async with opened() as (_, _, wires):
        clock, waits = asyncio.get_running_loop(), []
        wire = wires[0]
        for _ in range(4):
            wire.send(Welcome())
            assert await wire.receive() is None
            began = clock.time()
            wire = await come(0)
            waits.append(round(clock.time() - began, 1))
        assert waits == [0.5, 1.0, 2.0, 4.0]


@simulated
async def test_copies_count_where_every_rank_made_them():
    async with opened() as (group, _, wires):
        plane = RanksPlane(group, None, None, store_timeout=1.0)
        for first, second, failed in (
            (b"\0\0", b"\0\1", (1,)),
            (b"\0\1", b"\0\0", (1,)),
            (b"\0\1", b"\1\0", (0, 1)),
            (b"\0\0", b"\0\0", ()),
        ):
            run = asyncio.ensure_future(plane.copy_pairs(Direction.TO_DEVICE, [1, 2], [3, 4]))
            for wire, sent in zip(wires, (first, second), strict=True):
                wire.send(RankAnswer((await wire.receive()).op, sent))
            assert await run == failed
        assert group.healthy


@simulated
async def test_layers_count_when_every_rank_has_them_and_never_go_back():
    async with opened() as (group, _, wires):
        reported = []
        asked = asyncio.ensure_future(group.scatter(copy, reported.append, outcomes=2))
        ops = [(await wire.receive()).op for wire in wires]
        for which, layers in ((0, 3), (1, 1), (1, 1), (1, 2), (0, 1), (1, 5), (0, 4)):
            wires[which].send(Arrived(ops[which], layers))
            await settle()
        assert reported == [1, 2, 3, 4]
        for wire, op in zip(wires, ops, strict=True):
            wire.send(RankAnswer(op, bytes(2)))
            wire.send(Arrived(op, 9))  # too late
        await asked
        await settle()
        assert reported == [1, 2, 3, 4]


@simulated
async def test_a_rank_is_silent_until_every_pending_answer_has_arrived():
    async with opened() as (group, _, wires):
        asked = [asyncio.ensure_future(group.scatter(copy, outcomes=2)) for _ in range(2)]
        await settle()
        ops = [(await wires[0].receive()).op for _ in asked]
        for _ in asked:
            wires[1].send(RankAnswer((await wires[1].receive()).op, bytes(2)))
        await asyncio.sleep(1.0)
        assert [rank.health for rank in group.statistics()] == ["silent", "healthy"]
        assert await group.scatter(copy, outcomes=2) == [None, None]
        wires[0].send(RankAnswer(ops[0], bytes(2)))
        await settle()
        assert not group.healthy
        wires[0].send(RankAnswer(ops[1], bytes(2)))
        await settle()
        assert group.healthy
        answers = [await task for task in asked]
        assert {answer.op for both in answers for answer in both} == set(ops)
        assert group.statistics()[0].silences == 1


@simulated
async def test_a_cancelled_operation_still_waits_for_every_rank():
    async with opened() as (group, _, wires):
        asked = asyncio.ensure_future(group.scatter(copy, outcomes=2))
        await settle()
        asked.cancel()
        wires[0].send(RankAnswer((await wires[0].receive()).op, bytes(2)))
        await asyncio.sleep(5.0)
        assert not asked.done()
        wires[1].send(RankAnswer((await wires[1].receive()).op, bytes(2)))
        await asyncio.wait((asked,))
        assert asked.cancelled()
        assert group.healthy


# -- stores


@simulated
async def test_a_store_holds_the_blocks_of_all_ranks_and_forgets_those_lost_by_one():
    async with opened(A + B, B + C + A) as (group, store, wires):
        assert set(store.keys()) == {A, B}
        wires[0].close()
        await settle()
        assert store.probe([A, B]) == 0
        await come(0, A + C)
        assert group.healthy
        assert store.keys() == [A]
        assert store.take_removed() == [B]
        assert store.probe([A]) == 1


@simulated
async def test_a_store_of_a_rank_that_is_lost_was_not_available():
    async with opened(A, A) as (group, store, wires):
        reading = asyncio.ensure_future(store.read([A], SlotViews(None, [0]), lambda: False))
        assert isinstance(await wires[0].receive(), StoreObjects)
        wires[0].send(RankAnswer(1 << 40))
        message = await wires[1].receive()
        wires[1].send(RankAnswer(message.op, bytes(1)))
        await come(0, A)
        assert await reading == (bytes([Outcome.UNAVAILABLE]), [])
        assert store.keys() == [A]
        assert group.healthy


# -- sockets


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


GARBAGE = {
    "cut off": b"\x01\x00",
    "empty": framed(b""),
    "noise": framed(bytes(range(256))),
    "huge": (FROM_RANK_BYTES + 1).to_bytes(4, "little") + b"x",
    "above the limit of strangers": framed(bytes(UNPROVEN_BYTES + 1)),
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
    wires = [await come(rank, endpoint=f"unix://{path}") for rank in range(2)]
    await opening
    assert isinstance(wires[0], StreamConnection)
    wires[0]._writer.write(data)
    wires[0]._writer.write_eof()
    assert await wires[0].receive() is None
    assert [rank.health for rank in group.statistics()] == ["away", "healthy"]
    await group.close()
    for wire in wires:
        wire.close()
