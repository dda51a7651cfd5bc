"""The calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from kvactors.testing.attentionstore_sdk.api.common.common_pb2 import MEDIA_HBM
from kvactors.testing.attentionstore_sdk.client.client import AttentionType
from kvactors.testing.attentionstore_sdk.service import Path, connect
from kvactors.testing.attentionstore_sdk.utils.err import AttentionStoreSDKError


class Tokens:
    """Token ids and the number of them in a block."""

    def __init__(self, ids: Any, block_size: Any) -> None:
        if not isinstance(ids, list) or not all(isinstance(one, int) and 0 <= one < 2**32 for one in ids):
            raise AttentionStoreSDKError("token ids must be a list of unsigned 32-bit ints")
        if block_size < 1:
            raise AttentionStoreSDKError("block size must be positive")
        self.ids: list[int] = ids
        self.block_size = block_size

    def paths(self, start: int) -> Iterator[Path]:
        """The path of every full block from `start` on."""
        for block in range(start, len(self.ids) // self.block_size):
            yield tuple(self.ids[: (block + 1) * self.block_size])


class AttentionStoreSDK:
    """Ten positional arguments, or eleven and three keywords on CUDA (the bytes of a key block and of a value block)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.cuda = bool(keywords)
        if len(arguments) != (11 if self.cuda else 10):
            raise TypeError(f"{len(arguments)} positional arguments")
        if self.cuda and keywords != {"attention_type": AttentionType.MHA, "enable_as_kv_rw": True, "gpu_count": 0}:
            raise TypeError(f"keywords {keywords}")
        namespace, pod, version, self.shard, self.shards, self.layers, self.block_size, self.key_bytes, *rest = arguments
        self.value_bytes = rest[0] if self.cuda else self.key_bytes
        for one in (self.shard, self.shards, self.layers, self.block_size, self.key_bytes, self.value_bytes, *rest):
            if not isinstance(one, int):
                raise TypeError(f"{one!r} is not an int")
        self.service = connect((namespace, pod, version, self.shard))
        self.service.enter("init", arguments, keywords)
        try:
            self._refuse_if_broken()
        finally:
            self.service.leave()

    def match(self, tokens: Tokens, start: int, timeout: float) -> Any:
        """Blocks from `start` on that can be read."""
        self.service.enter("match", tokens, start, timeout)
        try:
            if self.service.not_ready:
                self.service.not_ready -= 1
                raise AttentionStoreSDKError("match failed: cuda memory not ready, retry later")
            self._check(tokens, start)
            found = 0
            for path in tokens.paths(start):
                if (path, 0) not in self.service.objects:
                    break
                found += 1
            return self.service.counted(found)
        finally:
            self.service.leave()

    def flush_token_index(self, layers: list[int], tokens: Tokens, start: int, source: Any, destination: Any) -> None:
        """Blocks from `start` to the end of the tokens have come (from nowhere to a medium) or gone."""
        one = self.service
        one.enter("flush_token_index", layers, tokens, start, source, destination)
        try:
            one.flushes += 1
            one.token_bytes += 4 * len(tokens.ids)
            if one.fail_every and one.flushes % one.fail_every == 0:
                raise AttentionStoreSDKError("flush was told to fail")
            self._check(tokens, start, layers)
            if (source, destination) not in ((None, MEDIA_HBM), (MEDIA_HBM, None)):
                raise AttentionStoreSDKError("exactly one medium, and it is HBM")
            if len(tokens.ids) % self.block_size or not start < len(tokens.ids) // self.block_size:
                raise AttentionStoreSDKError("a flush is about whole blocks, one at least")
            paths = tokens.paths(start)
            (one.resident.update if source is None else one.resident.difference_update)(paths)
            if one.fail_after:
                raise AttentionStoreSDKError("done, but the answer was lost")
        finally:
            one.leave()

    def read(
        self, layers: list[int], tokens: Tokens, start: int, keys: Sequence[int], values: Sequence[int], blocks: Sequence[int],
        timeout: float, **options: Any,
    ) -> Any:  # fmt: skip
        """Bytes into device blocks, one pointer a layer; stops at the first block that is not there. How many were read."""
        return self._move("read", layers, tokens, start, keys, values, blocks, {"remote_addrs": None}, options)

    def write(
        self, layers: list[int], tokens: Tokens, start: int, keys: Sequence[int], values: Sequence[int], blocks: Sequence[int],
        timeout: float, **options: Any,
    ) -> Any:  # fmt: skip
        """Bytes out of device blocks. How many were written."""
        return self._move("write", layers, tokens, start, keys, values, blocks, {"h2h_copy": False, "params": None}, options)

    def _move(
        self, name: str, layers: list[int], tokens: Tokens, start: int, keys: Sequence[int], values: Sequence[int],
        blocks: Sequence[int], expected: dict[str, Any], options: dict[str, Any],
    ) -> Any:  # fmt: skip
        one = self.service
        one.enter(name, layers, tokens, start, keys, values, blocks, options)
        try:
            self._check(tokens, start, layers)
            if options != (expected if self.cuda else {}) or len(keys) != self.layers or len(values) not in (0, self.layers):
                raise AttentionStoreSDKError(f"{name}: {options}, {len(keys)} key pointers, {len(values)} value pointers")
            moved = 0
            for path, block in zip(tokens.paths(start), blocks, strict=False):
                if name == "read" and (path, 0) not in one.objects:
                    break
                for layer in layers:
                    self._move_block(name, path, layer, keys[layer], values[layer] if values else 0, block)
                moved += 1
            return one.counted(moved)
        finally:
            one.leave()

    def _move_block(self, name: str, path: Path, layer: int, key: int, value: int, block: int) -> None:
        parts = [(key + block * self.key_bytes, self.key_bytes)]
        parts += [(value + block * self.value_bytes, self.value_bytes)] if value else []
        if name == "write":
            self.service.objects[path, layer] = b"".join(ctypes.string_at(at, size) for at, size in parts)
            return
        data = self.service.objects[path, layer]
        for at, size in parts:
            ctypes.memmove(at, data[:size], size)
            data = data[size:]

    def _check(self, tokens: Tokens, start: Any, layers: list[int] | None = None) -> None:
        self._refuse_if_broken()
        if tokens.block_size != self.block_size:
            raise AttentionStoreSDKError(f"blocks of {tokens.block_size} tokens, not {self.block_size}")
        if not isinstance(start, int) or not 0 <= start <= len(tokens.ids) // self.block_size:
            raise AttentionStoreSDKError(f"block {start!r} of {len(tokens.ids)} tokens")
        if layers is not None and layers != list(range(self.layers)):
            raise AttentionStoreSDKError(f"layers {layers}")

    def _refuse_if_broken(self) -> None:
        if self.service.broken:
            raise AttentionStoreSDKError(self.service.broken)
