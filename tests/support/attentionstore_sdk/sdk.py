"""The calls. Arguments are checked as strictly as the documented interface allows. The service may
refuse anything else, so nothing else is accepted."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.attentionstore_sdk.api.common.common_pb2 import MEDIA_HBM
from tests.support.attentionstore_sdk.client.client import AttentionType
from tests.support.attentionstore_sdk.service import Path, connect
from tests.support.attentionstore_sdk.utils.err import AttentionStoreSDKError


class Tokens:
    """Token ids and the number of them in a block."""

    def __init__(self, ids: Any, block_size: Any) -> None:
        if not isinstance(ids, list) or not all(
            type(one) is int and 0 <= one < 2**32 for one in ids
        ):
            raise AttentionStoreSDKError("token ids must be a list of unsigned 32-bit ints")
        if not ids:
            raise AttentionStoreSDKError("there must be one token id at least")
        if type(block_size) is not int or block_size < 1:
            raise AttentionStoreSDKError("block size must be a positive int")
        self.ids: list[int] = ids
        self.block_size = block_size

    @property
    def blocks(self) -> int:
        """Full blocks."""
        return len(self.ids) // self.block_size

    def paths(self, start: int) -> Iterator[Path]:
        """The path of every full block from `start` on."""
        for block in range(start, self.blocks):
            yield tuple(self.ids[: (block + 1) * self.block_size])


class AttentionStoreSDK:
    """Ten positional arguments, or eleven and three keywords on CUDA (the bytes of a key block and
    of a value block). One object for each shard in a process."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.cuda = bool(keywords)
        if len(arguments) != (11 if self.cuda else 10):
            raise TypeError(f"{len(arguments)} positional arguments")
        kind = keywords.get("attention_type", AttentionType.MHA)
        if self.cuda and keywords != {
            "attention_type": kind,
            "enable_as_kv_rw": True,
            "gpu_count": 0,
        }:
            raise TypeError(f"keywords {keywords}")
        if not isinstance(kind, AttentionType):
            raise TypeError(f"attention type {kind!r}")
        self.latent = kind is AttentionType.MLA
        (
            namespace,
            pod,
            version,
            self.shard,
            self.shards,
            self.layers,
            self.block_size,
            self.key_bytes,
            *rest,
        ) = arguments
        self.value_bytes = rest.pop(0) if self.cuda else self.key_bytes
        device, dp = rest
        for text in (namespace, pod, version):
            if not isinstance(text, str) or not text:
                raise TypeError(f"{text!r} is not a name")
        for least, one in (
            (0, self.shard),
            (1, self.shards),
            (1, self.layers),
            (1, self.block_size),
            (1, self.key_bytes),
            (1, self.value_bytes),
            (0, device),
            (0, dp),
        ):
            if type(one) is not int or one < least:
                raise TypeError(f"{one!r} is not an int of at least {least}")
        if self.shard >= self.shards:
            raise AttentionStoreSDKError(f"there is no shard {self.shard} of {self.shards}")
        self.service = connect((namespace, pod, version, self.shard))
        self.service.enter("init", arguments, keywords)
        try:
            self._refuse_if_broken()
            if self.service.connected:
                raise AttentionStoreSDKError(
                    f"this process has an SDK object for shard {self.shard} of "
                    f"{namespace}/{pod}/{version}"
                )
            self.service.connected = True
        finally:
            self.service.leave()

    def match(self, tokens: Tokens, start: int, timeout: float) -> Any:
        """Blocks that can be read: of those from `start` on, or from the root on
        (`Service.from_root`)."""
        self._check_timeout("match", timeout)
        self.service.enter("match", tokens, start, timeout, timeout=timeout)
        try:
            if self.service.not_ready:
                self.service.not_ready -= 1
                raise AttentionStoreSDKError("match failed: cuda memory not ready, retry later")
            self._check(tokens, start)
            found = 0
            for path in tokens.paths(0 if self.service.from_root else start):
                if (path, 0) not in self.service.objects:
                    break
                found += 1
            return self.service.counted(found)
        finally:
            self.service.leave()

    def flush_token_index(
        self, layers: list[int], tokens: Tokens, start: int, source: Any, destination: Any
    ) -> None:
        """Blocks from `start` to the end of the tokens have come (from nowhere to a medium) or
        gone."""
        one = self.service
        one.enter("flush_token_index", layers, tokens, start, source, destination)
        try:
            one.flushes += 1
            one.token_bytes += 4 * len(tokens.ids)
            if one.fail_every and one.flushes % one.fail_every == 0:
                raise AttentionStoreSDKError("flush was set to fail")
            self._check(tokens, start, layers)
            if (source, destination) not in ((None, MEDIA_HBM), (MEDIA_HBM, None)):
                raise AttentionStoreSDKError("exactly one medium, and it is HBM")
            if len(tokens.ids) % self.block_size or not start < tokens.blocks:
                raise AttentionStoreSDKError("a flush is about whole blocks, one at least")
            paths = tokens.paths(start)
            (one.resident.update if source is None else one.resident.difference_update)(paths)
            if one.fail_after:
                raise AttentionStoreSDKError("done, but the answer was lost")
        finally:
            one.leave()

    def read(self, *arguments: Any, **options: Any) -> Any:
        """Read bytes into device blocks, one pointer a layer. Stops at the first block that is not
        there. Returns the number of blocks read."""
        return self._move("read", {"remote_addrs": None}, options, *arguments)

    def write(self, *arguments: Any, **options: Any) -> Any:
        """Bytes out of device blocks. How many were written."""
        return self._move("write", {"h2h_copy": False, "params": None}, options, *arguments)

    def _move(
        self,
        name: str,
        expected: dict[str, Any],
        options: dict[str, Any],
        layers: list[int],
        tokens: Tokens,
        start: int,
        keys: Sequence[int],
        values: Sequence[int],
        blocks: Sequence[int],
        timeout: float,
    ) -> Any:
        one = self.service
        self._check_timeout(name, timeout)
        one.enter(name, layers, tokens, start, keys, values, blocks, options, timeout=timeout)
        try:
            self._check(tokens, start, layers)
            if options != (expected if self.cuda else {}):
                raise AttentionStoreSDKError(f"{name}: options {options}")
            self._check_pointers(name, keys, values)
            self._check_blocks(name, tokens, start, blocks)
            moved = 0
            for path, block in zip(tokens.paths(start), blocks, strict=True):
                if name == "read" and (path, 0) not in one.objects:
                    break
                if block == one.refuse_block:
                    raise AttentionStoreSDKError(f"{name}: unknown device block {block}")
                for layer in layers:
                    self._move_block(
                        name, path, layer, keys[layer], 0 if self.latent else values[layer], block
                    )
                one.use(path)
                if name == "write":
                    one.make_room(path)
                moved += 1
            return one.counted(moved)
        finally:
            one.leave()

    def _move_block(
        self, name: str, path: Path, layer: int, key: int, value: int, block: int
    ) -> None:
        parts = [(key + block * self.key_bytes, self.key_bytes)]
        parts += [(value + block * self.value_bytes, self.value_bytes)] if value else []
        if name == "write":
            self.service.objects[path, layer] = b"".join(
                ctypes.string_at(at, size) for at, size in parts
            )
            return
        data = self.service.objects[path, layer]
        for at, size in parts:
            ctypes.memmove(at, data[:size], size)
            data = data[size:]

    def _check(self, tokens: Tokens, start: Any, layers: list[int] | None = None) -> None:
        self._refuse_if_broken()
        if not isinstance(tokens, Tokens):
            raise AttentionStoreSDKError(f"{type(tokens).__name__} in place of Tokens")
        if tokens.block_size != self.block_size:
            raise AttentionStoreSDKError(
                f"blocks of {tokens.block_size} tokens, not {self.block_size}"
            )
        if type(start) is not int or not 0 <= start <= tokens.blocks:
            raise AttentionStoreSDKError(f"block {start!r} of {len(tokens.ids)} tokens")
        if layers is not None and layers != list(range(self.layers)):
            raise AttentionStoreSDKError(f"unknown layers {layers}")

    def _check_timeout(self, name: str, timeout: Any) -> None:
        if type(timeout) not in (int, float) or not 0 < timeout < math.inf:
            raise AttentionStoreSDKError(f"{name}: {timeout!r} is no time-out in seconds")

    def _check_pointers(self, name: str, keys: Sequence[int], values: Sequence[int]) -> None:
        if not all(type(one) is int and one > 0 for one in (*keys, *values)):
            raise AttentionStoreSDKError(f"{name}: pointers must be positive ints")
        if len(keys) != self.layers or len(values) != (0 if self.latent else self.layers):
            raise AttentionStoreSDKError(
                f"{name}: {len(keys)} key pointers and {len(values)} value pointers for "
                f"{self.layers} layers"
            )

    def _check_blocks(self, name: str, tokens: Tokens, start: int, blocks: Sequence[int]) -> None:
        if not isinstance(blocks, list) or not all(
            type(one) is int and 0 <= one < 2**31 for one in blocks
        ):
            raise AttentionStoreSDKError(
                f"{name}: device blocks must be a list of ints, not negative"
            )
        if len(set(blocks)) != len(blocks) or not blocks:
            raise AttentionStoreSDKError(
                f"{name}: {len(blocks)} device blocks, {len(set(blocks))} different ones"
            )
        if start + len(blocks) != tokens.blocks or len(tokens.ids) % self.block_size:
            raise AttentionStoreSDKError(
                f"{name}: {len(blocks)} device blocks from block {start} of {len(tokens.ids)} "
                "tokens on"
            )

    def _refuse_if_broken(self) -> None:
        if self.service.broken:
            raise AttentionStoreSDKError(self.service.broken)
