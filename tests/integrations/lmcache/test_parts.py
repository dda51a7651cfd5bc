"""Settings, identity, catalog and the file of the keys of LMCache's adapter."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvactors import ConfigError
from kvactors.integrations.lmcache import catalog
from kvactors.integrations.lmcache.catalog import (
    KeyFile,
    ObjectShape,
    is_serialized,
    layout_of,
    stored_object,
)
from kvactors.integrations.lmcache.settings import read_settings, store_config
from tests.integrations.lmcache.world import KEYS, LAYOUT

SHAPE = ObjectShape(LAYOUT, 10_000)
GOOD = {"directory": "/x", "capacity_bytes": "1GB"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"directory": None}, "directory must be a text"),
        ({"directory": ""}, "directory is empty"),
        ({"root": "/y"}, "unknown key 'root'"),
        ({"capacity_bytes": "much"}, "capacity_bytes must be a size"),
        ({"capacity_bytes": 4096}, "capacity_bytes must be at least"),
        ({"page_bytes": 1000}, "page_bytes must be a multiple of 4096, not 1000"),
        ({"page_bytes": 0}, "page_bytes must be a multiple"),
        ({"staging_bytes": "1MB"}, "staging_bytes must be at least"),
        ({"durability": "maybe"}, "durability"),
        ({"io_depth": 0}, "io_depth must be at least 1"),
        ({"timeout_s": -1}, "timeout_s must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be a finite number"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        store_config(read_settings(GOOD | changes))


@pytest.mark.parametrize("missing", ["directory", "capacity_bytes"])
def test_missing_settings_are_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"adapter_params.*{missing} is missing"):
        read_settings({name: value for name, value in GOOD.items() if name != missing})


def test_fields_do_not_run_into_one_another() -> None:
    keys = [
        KEYS[0]._replace(model_name="ab", cache_salt=""),
        KEYS[0]._replace(model_name="a", cache_salt="b"),
        KEYS[0]._replace(model_name="", cache_salt="ab"),
        KEYS[0]._replace(kv_rank=1, object_group_id=11),
        KEYS[0]._replace(kv_rank=11, object_group_id=1),
        KEYS[0]._replace(cache_salt="\ud800"),
    ]
    shapes = [ObjectShape(layout, 10_000) for layout in ("bfloat16[2,50,50]", "uint8[1]")]
    digests = {stored_object(key, SHAPE, 4096).digest for key in keys}
    digests |= {stored_object(keys[0], shape, 4096).digest for shape in shapes}
    assert len(digests) == len(keys) + len(shapes)


def test_a_model_in_a_folder_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = KEYS[0]._replace(model_name=str(tmp_path))
    digests = []
    for weights in ("one", "two", "one"):
        (tmp_path / "model.safetensors").write_text(weights)
        catalog.stored_model.cache_clear()  # as in a new process
        digests.append(stored_object(key, SHAPE, 4096).digest)
    assert digests[0] == digests[2] != digests[1]
    # a file system that hangs: no later process finds the objects
    hangs = threading.Event()
    monkeypatch.setattr(catalog, "MODEL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(catalog, "model_digest", lambda *_: hangs.wait(60.0))
    for _ in range(2):
        catalog.stored_model.cache_clear()
        digests.append(stored_object(key, SHAPE, 4096).digest)
    hangs.set()
    assert len(set(digests)) == 4


def test_layouts_as_text() -> None:
    assert layout_of([(2, 4), (8,)], ["torch.float16", "torch.int8"]) == "float16[2,4];int8[8]"
    assert is_serialized("uint8[100]")
    assert not any(map(is_serialized, ("uint8[10,10]", "uint8[4];uint8[4]", "float16[100]")))


def opened(path: Path) -> KeyFile:
    log = KeyFile(path)
    log.rewrite(log.read())
    return log


def test_the_file_of_the_keys_returns_its_records(tmp_path: Path) -> None:
    path = tmp_path / "a" / "keys.jsonl"
    log = opened(path)
    records = [(key._replace(cache_salt="ü\udcff"), SHAPE) for key in KEYS[:5]]
    log.append(records[:2])
    log.append(records[2:])
    log.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = opened(path)
    assert again.read() == records
    assert again._lines == 5
    again.close()
    again.close()
    with pytest.raises(OSError, match="closed"):
        again.append(records)


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_a_file_that_was_cut_loses_its_end_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "keys.jsonl"
    log = opened(path)
    records = [(key, SHAPE) for key in KEYS[:4]]
    log.append(records)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    left = opened(path)
    found = left.read()
    assert found == records[: len(found)]
    assert len(found) >= 4 - 1 - cut * 4 // len(whole)
    left.append(records[3:])
    assert left.read() == [*found, records[3]]
    left.close()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b'["zz","m",1,0,"","f",10]',
        b'["00","m",-1,0,"","f",10]',
        b'["00","m",true,0,"","f",10]',
        b'["00","m",1,0,"","f",0]',
        b'["00",5,1,0,"","f",10]',
        b'[7,"m",1,0,"","f",10]',
        b"[" * 5000,
    ],
)
def test_a_damaged_line_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "keys.jsonl"
    log = opened(path)
    log.append([(KEYS[0], SHAPE)])
    log.close()
    path.write_bytes(line + b"\n" + path.read_bytes() + line)
    assert KeyFile(path).read() == [(KEYS[0], SHAPE)]


def test_a_line_after_a_failed_write_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path / "keys.jsonl")
    write = os.write

    def full(fd: int, text: bytes) -> int:
        if len(text) > 10:
            return write(fd, text[:10])
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                log.append([(KEYS[0], SHAPE)])
    log.append([(KEYS[1], SHAPE)])
    assert log.read() == [(KEYS[1], SHAPE)]
    log.close()


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "keys.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        KeyFile(tmp_path / "keys.jsonl").read()
