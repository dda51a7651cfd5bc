"""Requests of an engine: their token chains, and the blocks that they hold in the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvactors.extra_keys import block_extras
from kvactors.integrations.fastdeploy.arguments import media_of, name_of, sequence_of, whole
from kvactors.integrations.fastdeploy.block_index import BlockIndex, IndexedBlock
from kvactors.integrations.fastdeploy.device_blocks import DeviceBlocks
from kvactors.native import Path
from kvactors.types import HASH_BYTES


class RequestRecord:
    """The chain of a request's block hashes, and the blocks that it holds.

    Args:
        request: FastDeploy's request.
        block_size: tokens of a block.
        root: the hash that the chain starts from.

    Attributes:
        path: tokens and block hashes.
        nodes: the leading blocks of the path, all held.
        spares: blocks of its table whose hash another request's block has in the index.
        finished: whether the engine has begun to write it to storage, as it does at the finish.
        writers: one entry for each write to storage that has not ended. Its blocks are not free
            before. Changed by any thread, in one step of the interpreter.
        has_media: whether media take part in its block hashes.

    Raises:
        TypeError: a token is no integer, or tokens or media have another form.
        ValueError: a token is not in 0 .. 2**32 - 1, or media overlap, are not in order or end
            after the last token.
    """

    def __init__(self, request: Any, block_size: int, root: bytes) -> None:
        self.path = Path(block_size, root)
        self.nodes: list[IndexedBlock] = []
        self.spares: list[int] = []
        self.finished = False
        self.writers: list[None] = []
        self.root = root
        self.has_media = self._set_media(request, block_size)
        self.extend(request)

    def _set_media(self, request: Any, block_size: int) -> bool:
        places, hashes = media_of(request)
        if not places:
            return False
        total = sum(len(tokens) for tokens in _parts(request))
        extras = block_extras(-(-total // block_size), block_size, places, hashes, num_tokens=total)
        for block, extra in extras.items():
            self.path.set_extra(block, extra)
        return bool(extras)

    def tokens_of(self, request: Any) -> int:
        """Tokens of the request. ValueError if it has fewer than at the last `extend`."""
        total = sum(map(len, _parts(request)))
        if total < self.path.num_tokens:
            raise ValueError(
                f"request {name_of(request)!r} had {self.path.num_tokens} tokens and has "
                f"{total} now"
            )
        return total

    def extend(self, request: Any) -> None:
        """Append the tokens that the request has got since the last call, all or none.

        Raises:
            ValueError: the request has fewer tokens than before, or a token is out of range.
        """
        chained, total = self.path.num_tokens, self.tokens_of(request)
        prompt, outputs = _parts(request)
        if chained >= len(prompt):
            fresh = outputs[chained - len(prompt) :]
        else:
            fresh = [*prompt[chained:], *outputs] if len(outputs) else prompt[chained:]
        if chained < total:
            self.path.extend(fresh)

    def hashes(self, start: int, stop: int) -> list[bytes]:
        """Hashes of full blocks."""
        packed = self.path.hashes(start, stop)
        return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _parts(request: Any) -> tuple[Any, Any]:
    """Prompt and output of a request."""
    return sequence_of(request, "prompt_token_ids"), sequence_of(request, "output_token_ids")


class Requests:
    """The requests that were matched and not released.

    Args:
        blocks: the device blocks.
        index: the prefix index.
    """

    def __init__(self, blocks: DeviceBlocks, index: BlockIndex) -> None:
        self._blocks = blocks
        self._index = index
        self._records: dict[str, RequestRecord] = {}
        self._leaving: dict[RequestRecord, str] = {}  # released during a write to storage
        self._forgotten: set[str] = set()  # by a reset, and not released since

    def __len__(self) -> int:
        return len(self._records)

    # -- any thread

    def begin_write(self, request: str) -> RequestRecord | None:
        """The record of a request, whose blocks stay until `end_write`. None if it holds nothing.

        A release that comes between the two look-ups is seen by one of them, or sees the writer.
        """
        record = self._records.get(request)
        if record is None:
            return None
        record.writers.append(None)
        if self.holds(request, record):
            return record
        self.end_write(record)
        return None

    def holds(self, request: str, record: RequestRecord) -> bool:
        """Whether a request still holds its record."""
        return self._records.get(request) is record

    @staticmethod
    def end_write(record: RequestRecord) -> None:
        """A write has ended."""
        record.writers.pop()

    # -- calls with the engine's lock

    def named(self, request: str) -> RequestRecord | None:
        """The record of a request, None if a reset has forgotten it.

        Raises:
            LookupError: it was not matched, or was released.
        """
        found = self._records.get(request)
        if found is None and request not in self._forgotten:
            raise LookupError(f"request {request!r} holds nothing: call request_match_blocks first")
        return found

    def open(self, request: str, record: RequestRecord) -> None:
        """A request was matched."""
        self._forgotten.discard(request)
        self._records[request] = record

    def uncommitted(
        self, record: RequestRecord, table: Sequence[int], full: int, request: str
    ) -> list[int]:
        """The blocks of a request's table that are full and not indexed.

        Args:
            record: of the request.
            table: the request's block table.
            full: blocks from the start of the table that are full.
            request: its id.

        Raises:
            ValueError: the table is too short, or has a block that the request does not hold.
        """
        start = len(record.nodes)
        if full <= start:
            return []
        if len(table) < full:
            raise ValueError(
                f"the block table of request {request!r} has {len(table)} blocks, and {full} are "
                "full"
            )
        own = [whole("a block id", block) for block in table[start:full]]
        self._blocks.check_held(own, request)
        return own

    def commit(self, record: RequestRecord, own: Sequence[int]) -> int:
        """Index the next blocks of a request, which has their tokens. See `uncommitted`.

        A block whose hash is indexed already stays the request's own until its release: the engine
        reads it.

        Returns:
            How many blocks were added to the index. They are the last ones of `record.nodes`.
        """
        start, added = len(record.nodes), 0
        hashes = record.hashes(start, start + len(own)) if own else []
        for block_hash, block in zip(hashes, own, strict=True):
            node = self._index.blocks.get(block_hash)
            if node is not None:
                self._index.hold([node])
                record.spares.append(block)
            else:
                parent = record.nodes[-1] if record.nodes else None
                self._blocks.index([block])
                node = self._index.add(block_hash, parent, block)
                added += 1
            record.nodes.append(node)
        return added

    def release(self, request: str) -> None:
        """A request holds nothing any more: its blocks are free at the next `settle` after its
        writes to storage have ended."""
        self._forgotten.discard(request)
        record = self._records.pop(request, None)
        if record is not None:
            self._leaving[record] = request

    def settle(self) -> list[RequestRecord]:
        """Release the blocks of requests whose writes to storage have ended. Returns them."""
        if not self._leaving:
            return []
        ended = [record for record in self._leaving if not record.writers]
        for record in ended:
            request = self._leaving.pop(record)
            self._index.release(record.nodes)
            spares, record.spares = record.spares, []
            self._blocks.give(spares, request)
        return ended

    def clear(self) -> list[RequestRecord]:
        """Forget every request. Returns the records whose blocks are still written to storage."""
        records = [*self._records.values(), *self._leaving]
        self._forgotten.update(self._records)
        self._records.clear()
        self._leaving.clear()
        return [record for record in records if record.writers]  # none begins any more
