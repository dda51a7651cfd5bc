"""`kvactors store list | verify | prune`."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from kvactors.cli import main
from kvactors.device.arena import Arena
from kvactors.identity import StoreIdentity
from kvactors.storage import inspect as inspect_module
from kvactors.storage.file.store import FileBackend
from kvactors.testing.faults import corrupt_objects
from kvactors.testing.store_contract import Bench, key

A = StoreIdentity("model-a", "default", bytes(32))
B = A._replace(fingerprint=bytes([1]) * 32)
OTHER = A._replace(model="model-b")


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["store", *(str(one) for one in arguments)])
    return int(ended.value.code or 0)


async def made(directory, identity, count=3):
    backend, arena = (
        FileBackend(identity.folder(directory), identity.digest, 5000, identity=identity),
        Arena(8, 5000),
    )
    await backend.open()
    await Bench(backend, arena).put(*range(count))
    arena.close()
    return backend


@pytest.fixture
async def directory(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.storage.file.store.SLAB_BYTES", 8 * 8192)
    for at, identity in enumerate((A, B, OTHER)):
        backend = await made(tmp_path, identity)
        await backend.close()
        os.utime(backend.files.folder / "lock", (1000 + at, 1000 + at))
    return tmp_path


def listed(directory):
    assert run("list", directory, "--json", directory / "o.json") == 0
    return msgspec.json.decode((directory / "o.json").read_bytes())


def test_list_names_the_stored_objects(directory, capsys):
    found = listed(directory)
    assert sorted((one["model"], one["digest"]) for one in found) == sorted(
        (i.model, i.digest.hex()) for i in (A, B, OTHER)
    )
    assert all((one["state"], one["objects"], one["in_use"]) == ("ok", 3, False) for one in found)
    assert all(one["slab_bytes"] >= 8 * 8192 for one in found)
    out = capsys.readouterr().out
    assert "model 'model-b', namespace 'default', rank 0 of 1" in out


async def test_verify_finds_bad_objects(directory, capsys):
    assert run("verify", directory) == 0
    backend = await made(directory, A, 0)
    corrupt_objects(backend, 2)
    await backend.close()
    assert run("list", directory) == 0
    assert run("verify", directory) == 1
    assert key(0).hex() in capsys.readouterr().out


def test_prune_keeps_the_layout_that_was_opened_last(directory, capsys):
    assert run("prune", directory, "--dry-run") == 0
    assert "would be removed" in capsys.readouterr().out
    assert len(listed(directory)) == 3
    assert run("prune", directory) == 0
    assert "another layout was used later" in capsys.readouterr().out
    assert {one["digest"] for one in listed(directory)} == {B.digest.hex(), OTHER.digest.hex()}
    assert run("prune", directory, "--keep", "0") == 0
    assert [path.name for path in directory.iterdir()] == ["o.json"], (
        "folders that are empty go as well"
    )


async def test_prune_refuses_a_store_in_use(directory, capsys):
    backend = await made(directory, A, 0)
    os.utime(backend.files.folder / "lock", (1, 1))
    assert run("prune", directory) == 1
    assert "refused: in use by a process" in capsys.readouterr().out
    assert len(listed(directory)) == 3
    assert [one["in_use"] for one in listed(directory)].count(True) == 1
    assert await Bench(backend, Arena(8, 5000)).get(0, 1, 2) == [0, 0, 0]
    await backend.close()


def test_prune_removes_damaged_stores_and_other_versions_and_leaves_other_files(directory, capsys):
    damaged, old = (
        A.folder(directory) / A.digest.hex()[:16],
        directory / "default" / "rank-0-of-1" / "0011",
    )
    (damaged / "table").write_bytes(b"\0" * 5000)
    (damaged / "mine.txt").write_text("stays")
    old.mkdir(parents=True)
    page = b'{"fingerprint":"00","block_bytes":5000,"stride":8192,"slots_per_slab":9,"magic":"KVACTORS slabs","version":1}'
    (old / "table").write_bytes(page.ljust(4096, b"\n"))
    (old / "slab-0000").write_bytes(bytes(8192))
    assert run("prune", directory) == 0
    out = capsys.readouterr().out
    assert "(format version 1," in out
    assert "(damaged," in out
    assert [path.name for path in damaged.iterdir()] == ["mine.txt"]
    assert not old.parent.parent.exists()
    assert len(listed(directory)) == 2


def test_prune_follows_no_link(directory, tmp_path_factory, capsys):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    folder = A.folder(directory) / A.digest.hex()[:16]
    folder.rename(elsewhere / "store")
    folder.symlink_to(elsewhere / "store")
    assert run("prune", directory, "--keep", "0") in (0, 1)
    assert (elsewhere / "store" / "table").exists()
    assert (elsewhere / "store" / "slab-0000").exists()


def test_a_directory_without_a_store_is_an_error(tmp_path, capsys):
    for command in ("list", "verify", "prune"):
        assert run(command, tmp_path) == 2
        assert "no file store here" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["valkey://h:1", "rediss://h:1", "unix:///tmp/s"])
def test_the_objects_of_a_server_are_refused_with_a_remedy(url, capsys):
    for command in ("list", "verify", "prune"):
        assert run(command, url) == 2
        assert "valkey-cli --scan" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("page", [b"", b"notes of a user\n", bytes(4096), b"\n" * 4096])
def test_files_of_others_named_table_are_no_stores_and_stay(directory, tmp_path_factory, page):
    alone = tmp_path_factory.mktemp("others")
    for root in (directory, alone):
        (root / "project").mkdir()
        (root / "project" / "table").write_bytes(page)
        (root / "project" / "lock").symlink_to("127.0.1.1:+4242")  # as a browser's
        (root / "project" / "slab-notes").write_text("of a user")
    assert len(listed(directory)) == 3
    assert run("verify", directory) == 0
    assert run("prune", directory, "--keep", 0) == 0
    assert run("prune", alone) == 2
    for root in (directory, alone):
        assert (root / "project" / "table").read_bytes() == page
        assert (root / "project" / "slab-notes").read_text() == "of a user"


async def test_every_damaged_place_of_a_store_in_use_is_found_or_counted(tmp_path):
    """Of 14 damaged objects one is read by the process, whose slot rests, and two are evicted for
    two new ones, before the check. The entry of another is damaged."""
    backend, arena = FileBackend(A.folder(tmp_path), A.digest, 5000, 15, identity=A), Arena(8, 5000)
    await backend.open()
    bench = Bench(backend, arena)
    for number in range(15):
        await bench.put(number)
    for number in range(14):
        slot, _ = backend.objects[key(number)]
        change_byte(backend.files.folder / "slab-0000", slot * 8192 + number * 300)
    slot, _ = backend.objects[key(13)]
    change_byte(backend.files.folder / "table", 4096 + slot * 192 + 50)
    await bench.get(0)
    await bench.put(20, 21)
    (one,) = inspect_module.inspect(tmp_path, verify=True)
    await backend.close()
    arena.close()
    assert one.in_use
    assert [n for n in range(14) if key(n) not in backend.objects] == [0, 1, 2]
    assert sorted(one.bad) == sorted(key(n).hex() for n in range(3, 13))
    assert one.torn == 1


def change_byte(path, at):
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("how", ["evicted", "cleared", "rotten"])
async def test_only_objects_in_the_table_can_be_bad(tmp_path, monkeypatch, how):
    """The process that writes removes the objects, and writes others in their slots, between the
    look at the table and that at the payloads."""
    backend, arena = FileBackend(A.folder(tmp_path), A.digest, 5000, 3, identity=A), Arena(8, 5000)
    await backend.open()
    bench = Bench(backend, arena)
    await bench.put(0, 1, 2)
    look, loop = inspect_module.differing_from, asyncio.get_running_loop()

    async def change() -> None:
        if how == "cleared":
            await backend.clear()
        if how == "evicted":
            await bench.put(10, 11, 12)
        else:  # after a clear, other payloads whose entries are not written yet
            corrupt_objects(backend, 1)

    def changed(*table):
        asyncio.run_coroutine_threadsafe(change(), loop).result(60)
        return look(*table)

    monkeypatch.setattr(inspect_module, "differing_from", changed)
    (one,) = await asyncio.to_thread(inspect_module.inspect, tmp_path, verify=True)
    assert one.in_use
    assert one.verified == 3
    assert (len(one.bad), one.left) == ((3, 0) if how == "rotten" else (0, 3))
    await backend.close()
    arena.close()


async def test_prune_removes_the_stores_of_a_namespace(directory, capsys):
    gone = [await made(directory, one._replace(namespace="gone")) for one in (A, B, OTHER)]
    assert run("prune", directory, "--namespace", "gone") == 1, "they are in use"
    for backend in gone:
        await backend.close()
    size = sum(one["slab_bytes"] for one in listed(directory) if one["namespace"] == "gone")
    capsys.readouterr()
    assert run("prune", directory, "--namespace", "gone", "--dry-run") == 0
    assert run("prune", directory, "--namespace", "gone") == 0
    assert f"{size:,} bytes freed" in capsys.readouterr().out
    assert [one["namespace"] for one in listed(directory)] == ["default"] * 3
    assert run("prune", directory, "--namespace", "gone") == 2
    assert "no store of namespace 'gone', only of ['default']" in capsys.readouterr().err
