"""`kvactors store list` and `verify`: the contents of a file store, read from outside."""

from __future__ import annotations

import msgspec
import pytest

from kvactors.cli import main
from kvactors.device.arena import Arena
from kvactors.storage.file.store import FileBackend
from kvactors.testing.faults import corrupt_objects
from kvactors.testing.store_contract import Bench, key


@pytest.fixture
async def store(tmp_path):
    backend, arena = (
        FileBackend(tmp_path / "default" / "rank-0-of-1", bytes(32), 5000),
        Arena(8, 5000),
    )
    await backend.open()
    await backend.attach(arena)
    await Bench(backend, arena).put(1, 2, 3)
    yield backend
    await backend.close()
    arena.close()


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)


def test_list_shows_the_objects_while_the_store_is_in_use(store, tmp_path, capsys):
    assert run("store", "verify", tmp_path, "--json", tmp_path / "o.json") == 0
    out = capsys.readouterr().out
    assert "3 objects, 15,000 bytes" in out
    assert "3 checked: 3 good, 0 bad" in out
    [found] = msgspec.json.decode((tmp_path / "o.json").read_bytes())
    assert (found["objects"], found["block_bytes"], found["bad"]) == (3, 5000, [])


def test_a_bad_object_is_named_and_the_exit_status_1(store, tmp_path, capsys):
    corrupt_objects(store, 2)
    assert run("store", "list", tmp_path) == 0, "a list reads nothing"
    assert run("store", "verify", tmp_path) == 1
    out = capsys.readouterr().out
    assert "2 bad" in out
    assert key(1).hex() in out


def test_a_folder_without_a_store_is_an_error(tmp_path, capsys):
    assert run("store", "list", tmp_path) == 2
    assert "no file store here" in capsys.readouterr().err


def test_a_damaged_table_is_listed_and_is_bad_when_verified(tmp_path, capsys):
    folder = tmp_path / "0123456789abcdef"
    folder.mkdir()
    (folder / "table").write_text("something else")
    assert run("store", "list", tmp_path) == 0
    assert "table damaged" in capsys.readouterr().out
    assert run("store", "verify", tmp_path) == 1
