"""Back ends by name, and the catalog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.errors import ConfigError
from kvactors.storage.catalog import Catalog
from kvactors.storage.factory import capacity_of, make_backend
from kvactors.storage.memory import MemoryBackend

SIZE = 5000
PRINT = bytes(range(32))


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") + bytes(28)


def test_back_ends_by_name():
    assert make_backend(StorageConfig(), "", PRINT, SIZE) is None
    assert isinstance(make_backend(StorageConfig(backend="memory"), "", PRINT, SIZE), MemoryBackend)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"backend": "file"}, "storage.directory is needed"),
        (
            {"backend": "fiel"},
            "unknown storage.backend 'fiel': choose none, memory, file, mooncake",
        ),
        ({"backend": "no.such:Store"}, "cannot be imported"),
        ({"backend": "builtins:dict"}, "cannot|is not a Backend"),
        ({"backend": "memory", "capacity_bytes": "1KB"}, "holds no block of 5000 bytes"),
        ({"backend": "mooncake", "exclusive": True}, "exclusive has no meaning"),
    ],
)
def test_back_ends_that_cannot_be(changes, complaint):
    with pytest.raises((ConfigError, TypeError), match=complaint):
        make_backend(StorageConfig(**changes), "m", PRINT, SIZE)


@pytest.mark.parametrize(
    ("blocks", "size", "capacity"),
    [(None, None, 0), (7, None, 7), (None, "50KB", 10), (3, "50KB", 3), (30, 51_000, 10)],
)
def test_a_capacity_in_blocks_and_in_bytes(blocks, size, capacity):
    assert capacity_of(StorageConfig(capacity_blocks=blocks, capacity_bytes=size), SIZE) == capacity


@pytest.mark.parametrize(
    "changes", [{"capacity_blocks": 0}, {"capacity_bytes": 0}, {"capacity_bytes": "0GB"}]
)
def test_a_capacity_of_zero_is_an_error_that_names_the_remedy(changes):
    with pytest.raises(
        ConfigError, match=r"must be at least 1, not .*leave it out for 80 % of the free space"
    ):
        Config.from_mapping({"storage": {"backend": "memory", **changes}})


@pytest.mark.parametrize("name", ["", "a/b", ".", "..", "a\0b", "n" * 201, "\u00e4" * 101])
def test_a_namespace_that_cannot_be_a_folder_is_an_error(name):
    with pytest.raises(ConfigError, match=r"storage\.namespace must "):
        Config.from_mapping({"storage": {"backend": "memory", "namespace": name}})


@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 9)),
        max_size=30,
    ),
)
def test_the_catalog_is_an_exact_lru(capacity, history):
    catalog, model = Catalog(capacity), []
    for step in history:
        if isinstance(step, int):
            catalog.remove([key(step)])
            model = [k for k in model if k != key(step)]
            continue
        batch = list(dict.fromkeys(key(i) for i in step))[-capacity:]
        admission = catalog.admit([key(i) for i in step])
        model = [k for k in model if k not in batch] + batch
        gone, model = model[: max(0, len(model) - capacity)], model[-capacity:]
        assert admission.evicted == gone
        assert catalog.keys() == model
