"""AttentionStore's token index as a sink: which token blocks this node holds on any tier.

A journal has the blocks that a sink published, for the process after this one, as JSON lines:

* `["+", start, parent hex, [hash hex, ..], [tokens of the complete path, ..]]`: these blocks are
  about to be sent as resident.
* `["+own", start, parent hex, [hash hex, ..], [tokens of these blocks, ..]]`: as before, below a
  parent that an earlier line has.
* `["-", [hash hex, ..]]`: the removal of these blocks was sent.

A last line without its end does not count: the process was killed while it wrote, and did not send
the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiofiles
import aiofiles.os
import msgspec
import numpy as np

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.attention_sdk import MARGIN, Sdk, SdkSettings
from kvactors.errors import SdkError, SinkError
from kvactors.files import open_private
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings.sinks import AttentionStoreSinkConfig
from kvactors.threads import DaemonExecutor
from kvactors.types import HASH_BYTES, Residency, split_hashes

THREADS = DaemonExecutor("kvactors-journal")

GROWTH_BYTES = 1 << 20  # by which a journal may exceed twice its size after the last rewrite
RETRY_AT_CLOSE = (0.0, 0.05, 0.2, 0.8)  # seconds before each attempt to retract everything


@dataclass(slots=True, eq=False, repr=False)
class PublishedBlock:
    """One block. Its tokens are its own, or from the root if the path above it is not known
    (`top`). A block that is not resident is kept for the blocks below it."""

    parent: bytes
    position: int
    tokens: bytes
    top: bool
    children: int = 0
    resident: bool = True  # the index may hold it


class PublishedBlocks:
    """Blocks that the index may hold, unacknowledged ones included, and their ancestors, parents
    before children: what a new incarnation, or the next process, must take back."""

    def __init__(self, block_size: int) -> None:
        self.block_bytes = 4 * block_size
        self.blocks: dict[bytes, PublishedBlock] = {}

    def holds(self, task: FlushTask) -> bool:
        return all(
            (block := self.blocks.get(block_hash)) is not None and block.resident
            for block_hash in split_hashes(task.hashes)
        )

    def add(self, parent: bytes, start: int, hashes: Sequence[bytes], tokens: bytes) -> None:
        """Add blocks of a path, from position `start`. tokens: from the root."""
        for position, block_hash in enumerate(hashes, start):
            block = self.blocks.get(block_hash)
            if block is None:
                above = self.blocks.get(parent)
                first = self.block_bytes * position if above is not None else 0
                own = tokens[first : self.block_bytes * (position + 1)]
                self.blocks[block_hash] = PublishedBlock(parent, position, own, above is None)
                if above is not None:
                    above.children += 1
            else:
                block.resident = True
            parent = block_hash

    def remove(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is not None:
                block.resident = False
            while block is not None and not block.resident and not block.children:
                del self.blocks[block_hash]
                block_hash = block.parent
                block = None if block.top else self.blocks[block_hash]
                if block is not None:
                    block.children -= 1

    def retractions(self) -> Iterator[tuple[list[bytes], int, bytes]]:
        """Paths whose removal takes everything back, the deepest first, each block in one: hashes,
        the position of the first, and the tokens from the root."""
        leaves = [block_hash for block_hash, block in self.blocks.items() if not block.children]
        leaves.sort(key=lambda block_hash: -self.blocks[block_hash].position)
        seen: set[bytes] = set()
        for leaf in leaves:
            chain = self._chain(leaf)
            fresh = next(i for i, block_hash in enumerate(chain) if block_hash not in seen)
            first = next(i for i in range(fresh, len(chain)) if self.blocks[chain[i]].resident)
            seen.update(chain)
            tokens = b"".join(self.blocks[block_hash].tokens for block_hash in chain)
            yield chain[first:], self.blocks[chain[first]].position, tokens

    def _chain(self, block_hash: bytes) -> list[bytes]:
        chain = [block_hash]
        while not self.blocks[block_hash].top:
            block_hash = self.blocks[block_hash].parent
            chain.append(block_hash)
        chain.reverse()
        return chain

    def path_tokens(self, block_hash: bytes) -> bytes:
        return b"".join(self.blocks[one].tokens for one in self._chain(block_hash))


class Journal:
    """The journal of published blocks at `path`, whose folder must exist. Nothing without a path.
    File errors are raised as SinkError."""

    def __init__(self, path: str, published: PublishedBlocks) -> None:
        self.path = Path(path)
        self._on = bool(path)
        self._published = published
        self._size = 0
        self._limit = GROWTH_BYTES

    async def read(self) -> None:
        """Add the blocks that an earlier process published and did not retract."""
        if not self._on:
            return
        try:
            opened = aiofiles.open(self.path, "ab+", opener=open_private, executor=THREADS)
            async with opened as file:  # made if it is not there
                await file.seek(0)
                data = await file.read()
        except OSError as error:
            raise SinkError(f"journal {self.path}: {error}") from error
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                replay(self._published, msgspec.json.decode(line))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise SinkError(f"journal {self.path}, line {number}: {error}") from error
        self._size = len(data)
        if len(whole) < len(data):
            await self.rewrite()

    async def resident(self, tasks: Iterable[FlushTask]) -> None:
        await self._append(
            [line_of(t.start_block_idx, t.parent, split_hashes(t.hashes), t.tokens) for t in tasks]
        )

    async def gone(self, hashes: Sequence[bytes]) -> None:
        await self._append([gone_line(hashes)] if hashes else [])

    async def _append(self, lines: list[bytes]) -> None:
        if lines and self._on:
            self._size += await self._write(lines)
            if self._size > self._limit:
                await self.rewrite()

    async def rewrite(self) -> None:
        if not self._on:
            return
        blocks, path_tokens = self._published.blocks, self._published.path_tokens
        lines = []
        for name, block in blocks.items():
            tokens = path_tokens(name) if block.top else block.tokens
            lines.append(line_of(block.position, block.parent, [name], tokens, whole=block.top))
        lines.append(gone_line(name for name, block in blocks.items() if not block.resident))
        fresh = self.path.with_name(self.path.name + ".new")
        self._size = await self._write(lines, fresh)
        self._limit = 2 * self._size + GROWTH_BYTES

    async def _write(self, lines: list[bytes], fresh: Path | None = None) -> int:
        """Append to the file, or replace it with `fresh`. Runs to the end even if the sink's
        deadline passes, so that lines stay in order. Returns the bytes written."""
        data = b"".join(line + b"\n" for line in lines)

        async def work() -> None:
            mode: Literal["ab", "wb"] = "ab" if fresh is None else "wb"
            path = fresh or self.path
            opened = aiofiles.open(path, mode, opener=open_private, executor=THREADS)
            async with opened as file:
                await file.write(data)
            if fresh is not None:
                await aiofiles.os.replace(fresh, self.path, executor=THREADS)

        try:
            await wait_uncancelled(asyncio.get_running_loop().create_task(work()))
        except OSError as error:
            raise SinkError(f"journal {self.path}: {error}") from error
        return len(data)


def gone_line(hashes: Iterable[bytes]) -> bytes:
    """A "-" line."""
    return msgspec.json.encode(["-", [one.hex() for one in hashes]])


def line_of(
    start: int, parent: bytes, hashes: Sequence[bytes], tokens: bytes, *, whole: bool = True
) -> bytes:
    """A "+" line, or without `whole` a "+own" line."""
    ids = np.frombuffer(tokens, "<u4").tolist()
    return msgspec.json.encode(
        ["+" if whole else "+own", start, parent.hex(), [one.hex() for one in hashes], ids]
    )


def replay(published: PublishedBlocks, line: object) -> None:
    """Apply a line. ValueError if it is malformed or contradicts an earlier one."""
    match line:
        case ["-", list(names)]:
            published.remove(parse_hashes(names))
        case ["+" | "+own" as kind, int(start), str(parent), list(names), list(ids)]:
            tokens, hashes = token_bytes(ids), parse_hashes(names)
            above = parse_hashes([parent] if parent else [])
            first = 0 if kind == "+" else start
            if start < 0 or len(tokens) != (start - first + len(hashes)) * published.block_bytes:
                raise ValueError(
                    f"{len(ids)} tokens do not belong to {len(hashes)} blocks from block {start} on"
                )
            block = published.blocks.get(above[0]) if above else None
            if block is not None and block.position != start - 1:
                raise ValueError(
                    f"block {start} does not follow its parent, which is block {block.position}"
                )
            if any(
                block_hash in published.blocks and published.blocks[block_hash].position != at
                for at, block_hash in enumerate(hashes, start)
            ):
                raise ValueError("a block is at another position than in an earlier line")
            if len(set(hashes)) < len(hashes):
                raise ValueError("a block is listed twice")
            if kind == "+own":
                if block is None:
                    raise ValueError("no earlier line has the parent")
                tokens = published.path_tokens(above[0]) + tokens
            published.add(above[0] if above else b"", start, hashes, tokens)
        case _:
            raise ValueError("unknown kind of line")


def parse_hashes(names: list[object]) -> list[bytes]:
    """Block hashes from hex. ValueError for anything else."""
    found = [bytes.fromhex(name) for name in names if isinstance(name, str)]
    if len(found) != len(names) or any(len(one) != HASH_BYTES for one in found):
        raise ValueError(f"a block hash is a string of {2 * HASH_BYTES} hex digits")
    return found


def token_bytes(ids: list[object]) -> bytes:
    """Token ids as little-endian uint32. ValueError for anything else."""
    if not all(type(one) is int and 0 <= one < 1 << 32 for one in ids):
        raise ValueError("token ids are integers below 2**32")
    return np.array(ids, "<u4").tobytes()


class AttentionStoreSink(Sink):
    """One index call a task, with the complete token path. The index cannot be emptied: the sink
    records what it published, and retracts that when an epoch begins."""

    by_tokens = True
    repeats = True

    def __init__(self, config: AttentionStoreSinkConfig, settings: SdkSettings) -> None:
        super().__init__(config, settings.block_size)
        self.announces_full = config.announce == "full"
        self.sdk = Sdk(settings, "index")
        self.ready_timeout = settings.store.ready_timeout_s + MARGIN
        self._published = PublishedBlocks(settings.block_size)
        self._answers = True  # whether the last call was answered
        self._log = get_logger()
        self._journal = Journal(config.journal, self._published)
        self._retracts_at_close = not config.journal
        if config.journal and not self._journal.path.parent.is_dir():
            raise SinkError(f"sink {self.name!r}: {self._journal.path.parent} is not a folder")

    async def open(self) -> None:
        await self._journal.read()
        try:
            await self.sdk.open()
        except BaseException:
            self.sdk.close()
            raise

    async def begin_epoch(self, epoch: int) -> None:
        """Retract what was published in earlier epochs. An interrupted retraction is continued by
        the next attempt."""
        for path in list(self._published.retractions()):
            await self._retract(*path)
        await self._journal.rewrite()

    async def _retract(self, hashes: list[bytes], start: int, tokens: bytes) -> None:
        await self._flush(tokens, start, resident=False)
        self._published.remove(hashes)

    async def _flush(self, tokens: bytes, start: int, *, resident: bool) -> None:
        self._answers = False
        try:
            await self.sdk.flush(np.frombuffer(tokens, "<u4"), start, resident=resident)
        except SdkError:
            self._answers = True  # an error is an answer
            raise
        self._answers = True

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.num_acknowledged = 0
        gains = [
            task
            for task in tasks
            if task.residency is Residency.RESIDENT and not self._published.holds(task)
        ]
        for task in gains:
            # before the call: a cancelled call may still be carried out
            hashes = split_hashes(task.hashes)
            self._published.add(task.parent, task.start_block_idx, hashes, task.tokens)
        await self._journal.resident(gains)
        gone: list[bytes] = []
        try:
            for task in tasks:
                resident = task.residency is Residency.RESIDENT
                await self._flush(task.tokens, task.start_block_idx, resident=resident)
                if not resident:
                    gone += split_hashes(task.hashes)
                self.num_acknowledged += 1
        finally:
            self._published.remove(gone)
        await self._journal.gone(gone)

    async def _retract_all(self) -> None:
        """Retract everything, and try a path whose retraction fails again a few times."""
        for pause in RETRY_AT_CLOSE:
            await asyncio.sleep(pause)
            failure: SdkError | None = None
            for path in list(self._published.retractions()):
                try:
                    await self._retract(*path)
                except SdkError as error:
                    failure = error
            if failure is None:
                return
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Retract everything, since this process holds nothing after its end. With a journal the
        next process does that. Skipped if the index does not answer."""
        try:
            if self._retracts_at_close and self._answers:
                await self._retract_all()
        except SdkError as error:
            self._log.warning(
                "retraction at close failed",
                sink=self.name,
                error=str(error),
                blocks=len(self._published.blocks),
            )
        finally:
            self.sdk.close()
