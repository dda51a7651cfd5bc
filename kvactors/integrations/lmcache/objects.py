"""Identity of LMCache's objects: their keys, layouts, and the keys of their pages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from kvactors.identity import field
from kvactors.integrations.model_files import model_digest
from kvactors.threads import Workers

OBJECT_DOMAIN = b"kvactors.lmcache.v1"
HASH, MODEL, RANK, GROUP, SALT, LAYOUT, SIZE = range(1, 8)
DIGEST_BYTES = 32
MODEL_TIMEOUT_S = 10.0
"""Seconds that the files of a model may take to be read, once in a process."""


class Key(Protocol):
    """LMCache's `ObjectKey`. It is hashable.

    `kv_rank` contains the world size and the rank, and the chunk's hash covers all tokens up to
    the chunk's end.
    """

    @property
    def chunk_hash(self) -> bytes: ...  # noqa: D102
    @property
    def model_name(self) -> str: ...  # noqa: D102
    @property
    def kv_rank(self) -> int: ...  # noqa: D102
    @property
    def object_group_id(self) -> int: ...  # noqa: D102
    @property
    def cache_salt(self) -> str: ...  # noqa: D102


class ObjectShape(NamedTuple):
    """The part of an object's identity that LMCache's key lacks.

    Attributes:
        layout: dtypes and shapes of its tensors. A shape contains the tokens of a chunk.
        size: bytes.
    """

    layout: str
    size: int


class StoredObject(NamedTuple):
    """An object of the store.

    Attributes:
        shape: its layout and size.
        digest: 32 bytes that identify key, layout and size.
        pages: number of its pages.
    """

    shape: ObjectShape
    digest: bytes
    pages: int

    def page_keys(self) -> list[bytes]:
        """The keys of its pages in the store."""
        return [self.page_key(number) for number in range(self.pages)]

    def page_key(self, number: int) -> bytes:
        """The key of one page."""
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
    """Whether an object of this layout is a string of bytes, as LMCache's serializers make it. Its
    layout is not the one that a look-up asks for."""
    return layout.startswith("uint8[") and "," not in layout and ";" not in layout
