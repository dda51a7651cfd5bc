"""A strict stand-in for Mooncake's client: the rules of the real one, and an error where the real
one would end the process.

Rules from runs of mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvactors.storage.header import NOT_FOUND, OK

INVALID, FAILED = -600, -800
UNREACHABLE = 2


class ProcessEnds(BaseException):
    """The real client would end the process here."""


class StandIn:
    """One client and its pool.

    Attributes:
        objects: of the pool.
        registered: sizes of the registrations by address.
        calls: names of the calls, in order.
        put_codes: results of the next puts. The pool stores nothing where one is not 0.
        health: not 0 if the master is gone.
        largest: bytes of a registration at most.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.put_codes: list[int] = []
        self.health = 0
        self.largest = 1 << 62
        self.lies = False
        self.evicts = False
        self._open = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if not self._open:
            raise ProcessEnds(name)

    def setup(self, *arguments: Any) -> int:
        self.calls.append("setup")
        self.joined = arguments
        self._open = True
        return OK

    def close(self) -> int:
        self.calls.append("close")
        if self.health:
            raise ProcessEnds("close blocks the interpreter while the master is gone")
        self._open = False
        return OK

    def register_buffer(self, address: int, size: int) -> int:
        self._call("register_buffer")
        overlaps = any(
            address < start + length and start < address + size
            for start, length in self.registered.items()
        )
        if overlaps or size <= 0 or size > self.largest:
            return INVALID
        self.registered[address] = size
        return OK

    def unregister_buffer(self, address: int) -> int:
        self._call("unregister_buffer")
        return OK if self.registered.pop(address, 0) else INVALID

    def put_from(self, key: str, address: int, size: int) -> int:
        self._call("put_from")
        code = self.put_codes.pop(0) if self.put_codes else OK
        if code == OK and not self.evicts:
            self.objects.setdefault(key, ctypes.string_at(address, size))
        return code

    def get_into(self, key: str, address: int, size: int) -> int:
        self._call("get_into")
        body = self.objects.get(key)
        if body is None:
            return NOT_FOUND
        if len(body) > size:
            return INVALID
        ctypes.memmove(address, bytes(len(body)) if self.lies else body, len(body))
        return len(body)

    def _whole(self, address: int, size: int) -> bool:
        """Whether a transfer lies in one registration, or in none: over RDMA it may not cross."""
        touched = [
            (start, length)
            for start, length in self.registered.items()
            if address < start + length and start < address + size
        ]
        return not touched or (
            len(touched) == 1 and touched[0][0] <= address and address + size <= sum(touched[0])
        )

    def batch_put_from_multi_buffers(self, keys: Any, pointers: Any, sizes: Any) -> list[int]:
        self._call("batch_put_from_multi_buffers")
        codes = []
        for key, where, lengths in zip(keys, pointers, sizes, strict=True):
            pieces = list(zip(where, lengths, strict=True))
            if not all(self._whole(*piece) for piece in pieces):
                codes.append(FAILED)
                continue
            body = b"".join(ctypes.string_at(*piece) for piece in pieces)
            self.objects.setdefault(key, body)
            codes.append(OK)
        return codes

    def batch_get_into_multi_buffers(self, keys: Any, pointers: Any, sizes: Any) -> list[int]:
        self._call("batch_get_into_multi_buffers")
        codes = []
        for key, where, lengths in zip(keys, pointers, sizes, strict=True):
            body = self.objects.get(key)
            if body is None:
                codes.append(NOT_FOUND)
                continue
            if not all(self._whole(*piece) for piece in zip(where, lengths, strict=True)):
                codes.append(FAILED)
                continue
            at = 0
            for address, length in zip(where, lengths, strict=True):
                ctypes.memmove(address, body[at : at + length], len(body[at : at + length]))
                at += length
            codes.append(len(body))
        return codes

    def batch_is_exist(self, keys: Any) -> list[int]:
        self._call("batch_is_exist")
        if self.health:
            return [FAILED] * len(keys)
        return [int(key in self.objects) for key in keys]

    def remove(self, key: str, force: bool = False) -> int:
        self._call("remove")
        return OK if self.objects.pop(key, None) is not None else NOT_FOUND

    def batch_remove(self, keys: Any, force: bool = False) -> list[int]:
        self._call("batch_remove")
        return [OK if self.objects.pop(key, None) is not None else NOT_FOUND for key in keys]
