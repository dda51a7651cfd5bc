"""Heads split over processes: each rank has its heads, its part of every block and its own
kvactors rank. The leader has the rest.

The leader asks all ranks for a layer's attention and adds their answers in the order of ranks, so
that the bits are the same every time. On the wire: a head (operation, layer, the chunk's rows,
blocks, rows' bytes), the blocks, the rows. The answer is a size and so many bytes: rows, a digest,
or nothing.

    python -P -m tiny_gpt.rank --rank 0 --ranks 2 --socket PATH ..      (started by
    `worker_processes`)
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import structlog

import kvactors
from tiny_gpt.model import BLOCK, SHARDS, SIZES, Place, Shard

HEAD = struct.Struct("<BBBBHI")
OPERATIONS = ("attend", "digest", "poison", "swap_blocks", "flip_bit")
ROWS = (BLOCK, SIZES.width)
SIZE = struct.Struct("<I")
START = 90.0
"""Seconds the workers may take to import Paddle and to connect."""
STEP = 60.0
"""Seconds an answer may take."""


def quiet() -> None:
    """Log only warnings of the library, so that the table is readable."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def receive(peer: socket.socket, size: int) -> bytearray:
    """Exactly so many bytes. ConnectionError if the peer is gone, TimeoutError if it is late."""
    data, have = bytearray(size), 0
    while have < size:
        got = peer.recv_into(memoryview(data)[have:])
        if not got:
            raise ConnectionError("the other side has closed the connection")
        have += got
    return data


class Ranks:
    """The leader's side, used from the model's thread."""

    def __init__(self, peers: Sequence[socket.socket]) -> None:
        self.peers = peers

    def attend(self, layer: int, place: Place, x: np.ndarray) -> list[np.ndarray]:
        """See `model.Attention`."""
        answers = self._ask(self.peers, "attend", layer, place, x.astype(np.float32).tobytes())
        return [np.frombuffer(one, np.float32).reshape(ROWS) for one in answers]

    def digest(self, blocks: Sequence[Sequence[int]]) -> list[bytes]:
        """See `model.Attention`. Ranks have one group."""
        return self._ask(self.peers, "digest", 0, Place(tuple(blocks[0]), 0, 0), b"")

    def tamper(self, fault: str, group: int, blocks: Sequence[int]) -> None:
        """See `model.Attention`."""
        peers = self.peers if fault == "poison" else self.peers[:1]
        self._ask(peers, fault, 0, Place(tuple(blocks), 0, 0), b"")

    @staticmethod
    def _ask(
        peers: Sequence[socket.socket], what: str, layer: int, place: Place, rows: bytes
    ) -> list[bytes]:
        blocks, *span = place
        message = (
            HEAD.pack(OPERATIONS.index(what), layer, *span, len(blocks), len(rows))
            + np.asarray(blocks, "<i4").tobytes()
            + rows
        )
        for peer in peers:
            peer.sendall(message)
        return [bytes(receive(peer, SIZE.unpack(receive(peer, SIZE.size))[0])) for peer in peers]


def answer(shard: Shard, peer: socket.socket) -> None:
    """A rank's side: do what the leader asks until it hangs up."""
    while True:
        try:
            operation, layer, first, end, count, size = HEAD.unpack(receive(peer, HEAD.size))
            blocks = np.frombuffer(receive(peer, 4 * count), "<i4").tolist()
            rows = receive(peer, size)
        except OSError:
            return
        result = b""
        if OPERATIONS[operation] == "attend":
            x = np.frombuffer(rows, np.float32).reshape(ROWS)
            result = shard.attend(layer, Place(tuple(blocks), first, end), x).tobytes()
        elif OPERATIONS[operation] == "digest":
            result = shard.digest(blocks)
        else:
            shard.tamper(OPERATIONS[operation], blocks)
        try:
            peer.sendall(SIZE.pack(len(result)) + result)
        except OSError:
            return


async def work(options: argparse.Namespace) -> None:
    """A worker's main task: the model's steps in a thread, kvactors' rank in the loop."""
    numbers, share = range(SIZES.layers), {"rank": options.rank, "ranks": options.ranks}
    shard = SHARDS[options.layout](options.layout, options.seed, options.blocks, numbers, **share)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(options.socket)
        peer.sendall(bytes([options.rank]))
        async with anyio.create_task_group() as group:
            if options.config:
                group.start_soon(_serve_rank, options, shard)
            try:
                await anyio.to_thread.run_sync(answer, shard, peer, abandon_on_cancel=True)
            finally:
                peer.shutdown(socket.SHUT_RDWR)  # ends the thread, if it was not that which ended
            group.cancel_scope.cancel()


async def _serve_rank(options: argparse.Namespace, shard: Shard) -> None:
    config = msgspec.json.decode(options.config, type=kvactors.Config)
    await kvactors.serve_rank(
        options.endpoint, shard.device, rank=options.rank, ranks=options.ranks, config=config
    )


@asynccontextmanager
async def worker_processes(
    layout: str,
    seed: int,
    blocks: int,
    ranks: int,
    directory: Path,
    config: kvactors.Config | None,
    endpoint: str,
) -> AsyncIterator[Ranks]:
    """Started workers, connected. config, endpoint: those of the leader's cache. Without a config
    the workers serve no rank of it."""
    path = directory / "steps"
    scenarios = str(Path(__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [scenarios, os.environ.get("PYTHONPATH")]))
    }
    shared = [
        "--layout",
        layout,
        "--seed",
        str(seed),
        "--blocks",
        str(blocks),
        "--ranks",
        str(ranks),
        "--socket",
        str(path),
    ]
    if config is not None:
        shared += ["--config", msgspec.json.encode(config).decode(), "--endpoint", endpoint]
    async with AsyncExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(ranks)
        listener.settimeout(START)
        for rank in range(ranks):
            command = [sys.executable, "-P", "-m", "tiny_gpt.rank", "--rank", str(rank), *shared]
            process = await asyncio.create_subprocess_exec(*command, env=environment)
            opened.push_async_callback(_end, process)
        peers = await anyio.to_thread.run_sync(_accept, listener, ranks)
        for peer in peers:
            opened.callback(peer.close)
        yield Ranks(peers)


def _accept(listener: socket.socket, ranks: int) -> list[socket.socket]:
    """One connection of each rank, in their order."""
    found: dict[int, socket.socket] = {}
    while len(found) < ranks:
        peer, _ = listener.accept()
        peer.settimeout(STEP)
        found[receive(peer, 1)[0]] = peer
    return [found[rank] for rank in range(ranks)]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a worker, which ends when the leader hangs up. One that does not is ended."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(10.0):
            await process.wait()
            return
        process.kill()
        await process.wait()


def main() -> None:
    """Run a worker."""
    parser = argparse.ArgumentParser()
    for name in ("layout", "socket", "config", "endpoint"):
        parser.add_argument(f"--{name}", default="")
    for name in ("rank", "ranks", "seed", "blocks"):
        parser.add_argument(f"--{name}", type=int)
    quiet()
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
