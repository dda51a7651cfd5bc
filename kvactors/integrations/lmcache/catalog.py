"""The objects of the store by LMCache's keys: order of use, locks, capacity. Pure state of one
thread."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvactors.actor.log import described, get_logger
from kvactors.files import open_private, private_folder, read_all
from kvactors.identity import field
from kvactors.integrations.engine import model_digest
from kvactors.threads import Workers

log = get_logger()

T = TypeVar("T")


# -- Identity of LMCache's objects: their keys, layouts, and the keys of their pages.

OBJECT_DOMAIN = b"kvactors.lmcache.v1"
HASH, MODEL, RANK, GROUP, SALT, LAYOUT, SIZE = range(1, 8)
DIGEST_BYTES = 32
MODEL_TIMEOUT_S = 10.0  # to read the files of a model, once in a process


class Key(NamedTuple):
    """LMCache's `ObjectKey`, which is used in its place. `kv_rank` has world size and rank, and
    the chunk's hash covers all tokens up to the chunk's end."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class ObjectShape(NamedTuple):
    """The part of an object's identity that LMCache's key lacks."""

    layout: str
    size: int


class StoredObject(NamedTuple):
    """An object of the store."""

    shape: ObjectShape
    digest: bytes
    pages: int

    def page_keys(self) -> list[bytes]:
        return [self.page_key(number) for number in range(self.pages)]

    def page_key(self, number: int) -> bytes:
        return self.digest + number.to_bytes(4, "little")


def stored_object(key: Key, shape: ObjectShape, page_bytes: int) -> StoredObject:
    """The object of a key."""
    parts = (
        (HASH, key.chunk_hash),
        (MODEL, stored_model(key.model_name).encode("utf-8", "surrogatepass")),
        (RANK, str(key.kv_rank).encode()),
        (GROUP, str(key.object_group_id).encode()),
        (SALT, key.cache_salt.encode("utf-8", "surrogatepass")),
        (LAYOUT, shape.layout.encode()),
        (SIZE, str(shape.size).encode()),
    )
    text = OBJECT_DOMAIN + b"".join(field(tag, value) for tag, value in parts)
    return StoredObject(shape, sha256(text).digest(), -(-shape.size // page_bytes))


@lru_cache(maxsize=256)
def stored_model(name: str) -> str:
    """The name of a model with the digest of its files, which LMCache names by their path."""
    disk = Workers(1, "kvactors-lmcache-model")
    try:
        digest = disk.submit(partial(model_digest, name, {})).result(MODEL_TIMEOUT_S)
    except TimeoutError:
        digest = secrets.token_hex()  # weights that are not known: no later process finds them
    finally:
        disk.close()
    return f"{name}@{digest}"


def layout_of(shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> str:
    """The layout of an object with these tensors, as text: `float16[2,4,64,256]`, for instance."""
    return _layout(tuple(tuple(shape) for shape in shapes), tuple(dtypes))


@lru_cache(maxsize=256)
def _layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
    return ";".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(str(size) for size in shape)}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def is_serialized(layout: str) -> bool:
    """Whether an object is bytes of LMCache's serializers: look-ups ask for another layout."""
    return layout.startswith("uint8[") and "," not in layout and ";" not in layout


def chunk_order(keys: Iterable[Key]) -> list[Key]:
    """Keys in the order of their chunks. LMCache gives the chunks of one object group and rank
    after those of another one, and a prefix needs chunks of all of them."""
    rows: Counter[tuple[int, int]] = Counter()
    placed = []
    for key in keys:
        row = key.kv_rank, key.object_group_id
        placed.append((rows[row], key))
        rows[row] += 1
    return [key for _, key in sorted(placed, key=itemgetter(0))]


class KeyCatalog:
    """Objects, least recently used first, with at most `capacity` pages. Locked objects are never
    evicted or removed. `reserved`: pages of objects that are being stored. `locks`: of each key,
    those of loads in flight included."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.reserved = 0
        self.nbytes = 0
        self.locks: Counter[Key] = Counter()
        self.objects: OrderedDict[Key, StoredObject] = OrderedDict()

    def items(self) -> list[tuple[Key, StoredObject]]:
        """Every key and its object, least recently used first."""
        return list(self.objects.items())

    def records(self) -> list[Record]:
        return [(key, found.shape) for key, found in self.objects.items()]

    def touch(self, keys: Iterable[Key]) -> None:
        """Keys of one prefix were used. Its beginning counts as used last: chunks at the end are
        evicted before those that they depend on."""
        for key in reversed(chunk_order(keys)):
            if key in self.objects:
                self.objects.move_to_end(key)

    def add(self, key: Key, found: StoredObject) -> None:
        """An object is in the store. It must not be in the catalog."""
        self.objects[key] = found
        self.used += found.pages
        self.nbytes += found.shape.size

    def remove(self, key: Key) -> StoredObject | None:
        found = self.objects.pop(key, None)
        if found is not None:
            self.used -= found.pages
            self.nbytes -= found.shape.size
        return found

    def lock(self, key: Key) -> None:
        self.locks[key] += 1

    def unlock(self, key: Key) -> None:
        """Take back one lock. A key without locks is left as it is."""
        if self.locks[key] <= 1:
            del self.locks[key]
        else:
            self.locks[key] -= 1

    def victims(self, pages: int, keep: Container[Key] = ()) -> list[Key] | None:
        """The keys to evict so that an object can be stored, None if it does not fit."""
        needed = self.used + self.reserved + pages - self.capacity
        chosen: list[Key] = []
        for key, found in self.objects.items():
            if needed <= 0:
                break
            if key not in self.locks and key not in keep:
                chosen.append(key)
                needed -= found.pages
        return chosen if needed <= 0 else None


# -- The keys of the stored objects in a file, since the store has their hashes alone.

Record = tuple[Key, ObjectShape]


SPARE_LINES = 1024  # beyond twice the objects: then the file is written anew


class KeyFile:
    """An append-only file with a line for every stored object, and the thread that writes it.

    The file proves nothing: an object counts when the store has its pages under the hash of the
    line's fields. A damaged line is skipped.

    Attributes:
        error: why the file does not take records, empty if it does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""
        self._lines = 0
        self._fd: int | None = None
        self._torn = False  # the last line may lack its end
        self._disk = Workers(1, "kvactors-lmcache-keys")
        self._finished = False

    # -- calls of the file system, which block

    def read(self) -> list[tuple[Key, ObjectShape]]:
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
            _write_all(fd, text)
            os.fsync(fd)
            other.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd, self._torn = fd, False
        self._lines = text.count(b"\n")

    def append(self, records: Iterable[Record]) -> None:
        if self._fd is None:
            raise OSError("the file of the keys is closed")
        text = b"".join(map(_line, records))
        begin, self._torn = b"\n" if self._torn else b"", True
        _write_all(self._fd, begin + text)
        self._torn = False
        self._lines += text.count(b"\n")

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    # -- calls that the thread of the file makes

    def run(self, call: Callable[[], T], limit: float) -> T:
        """The result of a call, TimeoutError after `limit` seconds."""
        return self._disk.submit(call).result(limit)

    def is_long(self, objects: int) -> bool:
        return self._lines > 2 * objects + SPARE_LINES

    def write(
        self, records: list[Record], whole: list[Record] | None, written: Callable[[], object]
    ) -> None:
        """Add records, or write the `whole` file anew. `written` is called in any case."""
        self._disk.submit(partial(self._write, records, whole)).add_done_callback(
            lambda _: written()
        )

    def _write(self, records: list[Record], whole: list[Record] | None) -> None:
        try:
            if whole is None:
                self.append(records)
            else:
                self.rewrite(whole)
        except OSError as error:
            if not self.error:
                log.error("keys of LMCache's objects not written", error=described(error))
            self.error = str(error)
        else:
            self.error = ""

    def finish(self, whole: list[Record], limit: float) -> None:
        """Write all records in the order of their use, in `limit` seconds at most."""
        if not self._finished:
            self._finished = True
            self._disk.submit(partial(self._write, [], whole))
            self._disk.end(limit)
            self._disk.close()


def _write_all(fd: int, text: bytes) -> None:
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


def _parsed(text: bytes) -> Iterator[tuple[Key, ObjectShape]]:
    for line in text.splitlines():
        with suppress(ValueError, TypeError, RecursionError):
            chunk_hash, model, rank, group, salt, layout, size = json.loads(line)
            numbers = all(type(number) is int and number >= 0 for number in (rank, group, size))
            texts = all(type(part) is str for part in (model, salt, layout))
            if numbers and texts and size:
                key = Key(bytes.fromhex(chunk_hash), model, rank, group, salt)
                yield key, ObjectShape(layout, size)
