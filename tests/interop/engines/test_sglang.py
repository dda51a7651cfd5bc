"""kvactors inside the whole SGLang engine, as HiCache storage and as linker: the tokens are those
that SGLang computes without it.

The storage is attached to running engines and detached again, since most of a case's time is the
start of the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK, SHARED
from tests.interop.engines import stores
from tests.interop.engines.sglang_engine import (
    ENVIRONMENT,
    PAGE_BYTES,
    UNITS,
    VARIABLES,
    SglangEngine,
    kvactors,
    linker,
)
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import Prompt, prompts
from tests.interop.environments import Environments, InteropError
from tests.interop.network import raise_loopback

pytestmark = pytest.mark.engines

Start = Callable[..., SglangEngine]

PROMPTS = prompts(6)
"""51 pages together: more than the device pool of 26 pages holds."""
WHOLE = 288
"""Tokens of a prompt of 320 that must come from a cache: all but the last page's."""


@pytest.fixture
def start_sglang(environments: Environments, tmp_path: Path) -> Iterator[Start | None]:
    """Starts SGLang engines with the tiny model. The arguments are those of `SglangEngine`."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    model = write_model(tmp_path / "model")
    made: list[SglangEngine] = []

    def start_one(extra: dict[str, Any] | None = None, **options: Any) -> SglangEngine:
        log = tmp_path / f"engine-{len(made)}.log"
        made.append(SglangEngine(environments, model, log, extra, **options))
        return made[-1]

    try:
        yield start_one
    finally:
        for one in made:
            one.discard()


def computed(
    start: Start,
    engine: SglangEngine | None,
    wanted: list[Prompt] = PROMPTS,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The tokens that SGLang computes for prompts. The tests of a session share them, as they
    depend on the machine only.

    Args:
        start: starts engines.
        engine: one without kvactors, with empty caches. None: a new one, if it is needed.
        wanted: prompts.
        settings: of the new engine.
        options: of `SglangEngine.serve`.
    """
    question = json.dumps([wanted, options], sort_keys=True)
    digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    known = Path(os.environ[SHARED]) / f"sglang-{digest}.json"
    if not known.is_file():
        plain = engine or start(hicache=False, **(settings or {}))
        known.write_text(json.dumps(plain.serve(wanted, **options).tokens))
        assert plain.flush()
        if engine is None:
            plain.close()
    return json.loads(known.read_text())


def flip(folder: Path, pattern: str) -> int:
    """Flip bits in every page of the files that match. Returns the number of pages."""
    pages = 0
    for path in folder.rglob(pattern):
        data = bytearray(path.read_bytes())
        for first in range(0, len(data), PAGE_BYTES):
            page = memoryview(data)[first : first + PAGE_BYTES]
            if any(page[:4096]):
                pages += 1
                for place in (len(page) // 3, len(page) // 2, 2 * len(page) // 3):
                    page[place // 4 * 4 + 3] ^= 0x40  # the exponent of a float
        path.write_bytes(data)
    return pages


def refuses_wrong_settings(engine: SglangEngine, folder: Path) -> None:
    """Settings and stores that cannot be used are named, and leave SGLang without a storage."""
    (folder / "file").write_text("no store")
    (folder / "read-only").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "kvactors-test", str(folder / "read-only")]
    subprocess.run(mount, check=True)
    good = kvactors(folder / "refused")
    for wrong, error in (
        ({"directory": str(folder)}, "unknown key 'directory'"),
        ({"storage": good["storage"] | {"directory": str(folder / "file")}}, "Not a directory"),
        ({"storage": good["storage"] | {"directory": str(folder / "read-only")}}, "Read-only file"),
    ):
        with pytest.raises(InteropError, match=error):
            engine.attach(good | wrong)


def test_hits_from_every_tier_after_kill_9_and_a_store_without_checksums(
    start_sglang: Start, tmp_path: Path
) -> None:
    engine = start_sglang()
    assert engine.opened["version"] == "0.5.23"
    plain = engine.serve(PROMPTS)
    wanted = plain.digest
    assert max(plain.cached) <= 64  # computed: only the common prefix was cached
    assert len({tuple(tokens or ()) for tokens in plain.tokens}) == len(PROMPTS)
    assert engine.flush()
    assert computed(start_sglang, engine) == plain.tokens
    refuses_wrong_settings(engine, tmp_path)
    extra = kvactors(tmp_path / "store")
    engine.attach(extra)
    assert engine.serve(PROMPTS).digest == wanted
    host = engine.serve(PROMPTS)
    assert (host.digest, min(host.cached)) == (wanted, WHOLE)
    assert host.total("host") > 0
    assert host.total("storage") == 0
    assert engine.flush()
    stored = engine.serve(PROMPTS)
    assert (stored.digest, min(stored.cached)) == (wanted, WHOLE)
    assert stored.total("storage") >= 5 * (WHOLE - 64)
    # a store that was closed and opened again, and one that was cleared
    assert engine.flush()
    engine.detach()
    engine.attach(extra)
    again = engine.serve(PROMPTS)
    assert (again.digest, min(again.cached)) == (wanted, WHOLE)
    assert again.total("storage") >= 5 * (WHOLE - 64)
    # the pages of other weights under the same path
    for seed, found in ((6, False), (5, True)):
        write_model(tmp_path / "model", seed)
        assert engine.flush()
        engine.detach()
        engine.attach(extra)
        assert bool(engine.serve(PROMPTS).total("storage")) is found
    assert engine.clear_storage()
    assert engine.flush()
    cleared = engine.serve(PROMPTS)
    assert (cleared.digest, cleared.total("storage")) == (wanted, 0)
    # flipped bits in kvactors' store are misses
    assert engine.flush()
    engine.detach()
    assert flip(tmp_path / "store", "slab*") >= 40
    engine.attach(extra)
    flipped = engine.serve(PROMPTS)
    assert (flipped.digest, flipped.total("storage")) == (wanted, 0)
    # negative control: in a store without checksums they are other tokens
    assert engine.flush()
    engine.detach()
    unverified = {"prefetch_threshold": 32, "file_storage_path": str(tmp_path / "unverified")}
    engine.attach(unverified, backend="file")
    assert engine.serve(PROMPTS).digest == wanted
    assert engine.flush()
    right = engine.serve(PROMPTS)
    assert (right.digest, right.total("storage") > 0) == (wanted, True)
    assert flip(tmp_path / "unverified", "*.bin") >= 40
    assert engine.flush()
    control = engine.serve(PROMPTS)
    assert control.total("storage") > 0
    assert control.digest != wanted
    # kill -9, and a new engine that opens the store at its start
    assert engine.flush()
    engine.detach()
    engine.attach(extra)
    assert engine.serve(PROMPTS).digest == wanted
    assert engine.flush()
    assert engine.serve(PROMPTS).total("storage") > 0
    engine.kill()
    engine = start_sglang(extra)
    first = engine.serve(PROMPTS)
    assert (first.digest, min(first.cached)) == (wanted, WHOLE)
    assert first.total("storage") >= 5 * (WHOLE - 64)
    engine.close()


def test_the_linker_brings_pages_from_host_and_storage(start_sglang: Start, tmp_path: Path) -> None:
    wanted = computed(start_sglang, None)
    engine = start_sglang(**linker(100, tmp_path / "store"))
    assert engine.serve(PROMPTS).tokens == wanted
    host = engine.serve(PROMPTS)
    assert (host.tokens, min(host.cached)) == (wanted, WHOLE)
    assert engine.flush()  # the host tier too
    stored = engine.serve(PROMPTS)
    assert (stored.tokens, min(stored.cached)) == (wanted, WHOLE)
    assert engine.flush()
    # flipped bits are misses, and those pages are stored again
    stores.flip(tmp_path / "store")
    flipped = engine.serve(PROMPTS)
    assert (flipped.tokens, max(flipped.cached) <= 64) == (wanted, True)
    assert engine.flush()
    repaired = engine.serve(PROMPTS)
    assert (repaired.tokens, min(repaired.cached)) == (wanted, WHOLE)
    engine.close()


@pytest.mark.engines_full
def test_the_linker_after_kill_9_and_an_orderly_end(start_sglang: Start, tmp_path: Path) -> None:
    wanted = computed(start_sglang, None)
    settings = linker(100, tmp_path / "store")
    engine = start_sglang(**settings)
    assert engine.serve(PROMPTS).tokens == wanted
    assert engine.flush()
    assert min(engine.serve(PROMPTS).cached) == WHOLE
    engine.kill()
    for _ in range(2):
        engine = start_sglang(**settings)
        again = engine.serve(PROMPTS)
        assert (again.tokens, min(again.cached)) == (wanted, WHOLE)
        engine.close()


def run_units(environments: Environments, folder: Path, *chosen: str) -> str:
    """Run `sglang_units_inner.py` in SGLang's environment. Returns the last line of pytest."""
    shutil.copy(UNITS, folder / "test_units.py")
    python = environments.program(ENVIRONMENT)
    plain = ["-q", "-x", "-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, "-m", "pytest", *plain, *chosen, "test_units.py"],
        cwd=folder,
        env=os.environ | VARIABLES | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.engines_full
def test_the_trees_and_host_pools_of_sglangs_test_kit(
    environments: Environments, tmp_path: Path
) -> None:
    last = run_units(environments, tmp_path)
    print(last)
    assert last.startswith("102 passed")


@pytest.mark.engines_full
def test_damaged_deleted_and_full_stores_give_the_right_tokens(
    start_sglang: Start, tmp_path: Path
) -> None:
    engine = start_sglang()
    wanted = engine.serve(PROMPTS).digest

    def served(name: str, model: str = "tiny", **storage: Any) -> Any:
        assert engine.flush()
        engine.attach(kvactors(tmp_path / name, **storage) | {"model": model})
        engine.serve(PROMPTS)
        assert engine.flush()
        found = engine.serve(PROMPTS)
        engine.detach()
        return found

    # a store that is cut, closed
    assert served("cut").total("storage") > 0
    for path in (tmp_path / "cut").rglob("slab*"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 3 + 7)
    assert served("cut").digest == wanted
    # a store whose files are removed and overwritten while it is open
    for damage in ("removed", "zeros"):
        assert engine.flush()
        engine.attach(kvactors(tmp_path / damage))
        assert engine.serve(PROMPTS).digest == wanted
        for path in (tmp_path / damage).rglob("slab*"):
            if damage == "removed":
                path.unlink()
            else:
                with path.open("r+b") as file:
                    file.write(bytes(path.stat().st_size))
        assert engine.flush()
        found = engine.serve(PROMPTS)
        assert found.digest == wanted
        assert damage == "removed" or found.total("storage") == 0
        engine.detach()
    # a store with no space for all pages, and one with no space at all
    small = served("small", capacity_blocks=20)
    assert small.digest == wanted
    full = served("full", free_space_floor=1 << 40)
    assert (full.digest, full.total("storage")) == (wanted, 0)
    # a store whose file system is full
    small_disk = stores.small_file_system(tmp_path / "disk", mebibytes=3)
    assert engine.flush()
    engine.attach(kvactors(small_disk, capacity_blocks=40, free_space_floor=0))
    (small_disk / "other").write_bytes(bytes(stores.free_bytes(small_disk)))
    for _ in range(2):
        assert engine.serve(PROMPTS).digest == wanted
        assert engine.flush()
    engine.detach()
    # the store of another model, which has pages of the same tokens
    assert served("model", "other").total("storage") > 0
    engine.attach(kvactors(tmp_path / "model") | {"model": "tiny"})
    assert engine.flush()
    other = engine.serve(PROMPTS)
    assert (other.digest, other.total("storage")) == (wanted, 0)
    engine.detach()
    # a store in memory
    in_memory = kvactors(None)
    assert engine.flush()
    engine.attach(in_memory)
    engine.serve(PROMPTS)
    assert engine.flush()
    found = engine.serve(PROMPTS)
    assert (found.digest, found.total("storage") > 0) == (wanted, True)
    engine.close()


@pytest.mark.engines_full
def test_failures_and_delays_that_sglang_injects(start_sglang: Start, tmp_path: Path) -> None:
    variables = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    engine = start_sglang(variables=variables)
    wanted = engine.serve(PROMPTS).digest
    assert engine.flush()
    engine.attach(kvactors(tmp_path / "store"))
    stored = 0
    for i in range(8):
        found = engine.serve(PROMPTS)
        assert found.digest == wanted
        stored += found.total("storage")
        assert engine.flush()
        # requests that end while their pages are read, and a flush at that time
        cancelled = engine.serve(PROMPTS, cancel={i % 6: 0, (i + 3) % 6: 0}, at_once=2)
        assert None in cancelled.tokens
        assert engine.flush()
    assert stored > 0
    engine.close()


@pytest.mark.engines_full
def test_two_engines_and_one_store(start_sglang: Start, tmp_path: Path) -> None:
    extra = kvactors(tmp_path / "store")
    one, other = start_sglang(extra), start_sglang()
    wanted = one.serve(PROMPTS).tokens
    assert other.serve(PROMPTS).tokens == wanted
    assert other.flush()
    with pytest.raises(InteropError, match="is in use by process"):
        other.attach(extra)
    other.attach(kvactors(tmp_path / "other"))  # the first engine's folder is left alone
    assert other.serve(PROMPTS).tokens == wanted
    assert one.flush()
    assert one.serve(PROMPTS).total("storage") > 0
    one.close()
    assert other.flush()
    other.detach()
    other.attach(extra)
    found = other.serve(PROMPTS)
    assert (found.tokens, min(found.cached)) == (wanted, WHOLE)
    assert found.total("storage") >= 5 * (WHOLE - 64)
    other.close()
    with pytest.raises(InteropError, match=r"storage.directory is needed"):
        start_sglang(kvactors(None) | {"storage": {"backend": "file"}})


def conversations(count: int, turns: int, seed: int) -> list[list[Prompt]]:
    """Prompts of conversations: each turn is the one before with more tokens."""
    draw = random.Random(seed)
    made: list[list[Prompt]] = []
    for _ in range(count):
        tokens: Prompt = []
        made.append([])
        for _ in range(turns):
            tokens = tokens + [draw.randrange(3, 1000) for _ in range(draw.randrange(20, 120))]
            made[-1].append(tokens)
    return made


@pytest.mark.engines_full
def test_two_tensor_parallel_ranks(start_sglang: Start, tmp_path: Path) -> None:
    """Each rank stores its heads. The tokens are compared with those of the same engine, since the
    ranks add numbers in another order than one rank does."""
    store = tmp_path / "store"
    # SGLang wants a NUMA node for each rank, or processors named for each
    processors = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    engine = start_sglang(kvactors(store), variables=processors, tp_size=2)
    wanted = engine.serve(PROMPTS).tokens
    assert engine.flush()
    stored = engine.serve(PROMPTS)
    assert (stored.tokens, min(stored.cached)) == (wanted, WHOLE)
    assert stored.total("storage") >= 5 * (WHOLE - 64)
    for rank in range(2):
        assert list(store.glob(f"*/default/rank-{rank}-of-2/*/slab-*"))
    assert engine.flush()
    stores.flip(store)
    flipped = engine.serve(PROMPTS)
    assert (flipped.tokens, flipped.total("storage")) == (wanted, 0)
    engine.close()


RETRACTED = "#retracted_reqs: 1"
"""In SGLang's output when it takes back requests to have space for others."""
PRESSURE = {"max_running_requests": 4, "max_total_tokens": 1600}
"""Settings of engines whose requests are retracted."""
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}


@pytest.mark.engines_full
@pytest.mark.parametrize("adapter", ["hicache", "linker"])
def test_random_conversations_with_retraction_and_cancelled_requests(
    start_sglang: Start, tmp_path: Path, adapter: str
) -> None:
    wanted = [turn for one in conversations(40, 5, seed=4) for turn in one]
    random.Random(5).shuffle(wanted)
    plain = computed(start_sglang, None, wanted, PRESSURE, at_once=4, max_tokens=16)
    more = linker(60, tmp_path / "store") if adapter == "linker" else {}
    engine = start_sglang(variables=RETRACTION, **PRESSURE, **more)
    if adapter != "linker":
        engine.attach(kvactors(tmp_path / "store"))
    draw = random.Random(6)
    sources = {"host": 0, "storage": 0}
    for _ in range(2):
        cancel = {i: draw.randrange(12) for i in draw.sample(range(len(wanted)), 40)}
        found = engine.serve(wanted, at_once=4, max_tokens=16, cancel=cancel)
        for i, tokens in enumerate(found.tokens):
            assert tokens == plain[i] or (tokens is None and i in cancel)
        assert None in found.tokens
        for source in sources:
            sources[source] += found.total(source)
        assert engine.flush()
    assert sources["host"] > 0
    assert adapter == "linker" or sources["storage"] > 0
    assert engine.logged(RETRACTED) > 0
    engine.close()
