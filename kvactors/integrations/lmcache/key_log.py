"""The keys of the stored objects in a file, since the store has their hashes alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvactors.files import open_private, private_folder, read_all
from kvactors.integrations.lmcache.objects import Key, ObjectShape


class StoredKey(NamedTuple):
    """A key as the file has it. Its fields are those of LMCache's `ObjectKey`."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


Record = tuple[Key, ObjectShape]


class KeyLog:
    """An append-only file with a line for every stored object. Every method blocks.

    The file proves nothing: an object counts when the store has its pages under the hash of the
    line's fields. A damaged line is skipped.

    Args:
        path: of the file.

    Attributes:
        lines: lines of the file, as far as they were written by this process or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self._fd: int | None = None
        self._torn = False  # the last line may lack its end

    def read(self) -> list[tuple[StoredKey, ObjectShape]]:
        """The records of the file, in the order of the lines. OSError."""
        private_folder(self.path.parent)
        try:
            fd = open_private(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            text = read_all(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        return list(_parsed(text))

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file by one that has these records alone. OSError."""
        text = b"".join(map(_line, records))
        other = self.path.with_suffix(".new")
        fd = open_private(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        try:
            _write(fd, text)
            os.fsync(fd)
            other.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd, self._torn = fd, False
        self.lines = text.count(b"\n")

    def append(self, records: Iterable[Record]) -> None:
        """Add records. OSError."""
        if self._fd is None:
            raise OSError("the file of the keys is closed")
        text = b"".join(map(_line, records))
        begin, self._torn = b"\n" if self._torn else b"", True
        _write(self._fd, begin + text)
        self._torn = False
        self.lines += text.count(b"\n")

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def _write(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]


def _line(record: Record) -> bytes:
    key, shape = record
    fields = [
        key.chunk_hash.hex(),
        key.model_name,
        key.kv_rank,
        key.object_group_id,
        key.cache_salt,
        shape.layout,
        shape.size,
    ]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _parsed(text: bytes) -> Iterator[tuple[StoredKey, ObjectShape]]:
    for line in text.splitlines():
        with suppress(ValueError, TypeError, RecursionError):
            chunk_hash, model, rank, group, salt, layout, size = json.loads(line)
            numbers = all(type(number) is int and number >= 0 for number in (rank, group, size))
            texts = all(type(part) is str for part in (model, salt, layout))
            if numbers and texts and size:
                key = StoredKey(bytes.fromhex(chunk_hash), model, rank, group, salt)
                yield key, ObjectShape(layout, size)
