"""kvactors as HiCache storage inside the whole SGLang engine: the tokens are those that SGLang
computes without it.

The storage is attached to running engines and detached again, since most of a case's time is the
start of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK
from tests.interop.engines.sglang_engine import PAGE_BYTES, SglangEngine, kvactors
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


def test_hits_from_every_tier_and_a_store_without_checksums(
    start_sglang: Start, tmp_path: Path
) -> None:
    engine = start_sglang()
    assert engine.opened["version"] == "0.5.23"
    plain = engine.serve(PROMPTS)
    wanted = plain.digest
    assert max(plain.cached) <= 64  # computed: only the common prefix was cached
    assert len({tuple(tokens or ()) for tokens in plain.tokens}) == len(PROMPTS)
    assert engine.flush()
    for wrong, error in (
        ({"directory": str(tmp_path)}, "unknown field `directory`"),
        ({"storage": {"backend": "file"}}, "storage.directory is needed"),
    ):
        with pytest.raises(InteropError, match=error):
            engine.attach(kvactors(None) | wrong)
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
    engine.close()


def test_hits_after_kill_9_and_after_an_orderly_end(start_sglang: Start, tmp_path: Path) -> None:
    plain = start_sglang(hicache=False)
    wanted = plain.serve(PROMPTS).digest
    plain.close()
    extra = kvactors(tmp_path / "store")
    engine = start_sglang(extra)
    assert engine.serve(PROMPTS).digest == wanted
    assert engine.flush()
    assert engine.serve(PROMPTS).total("storage") > 0
    engine.kill()
    for _ in range(2):
        engine = start_sglang(extra)
        first = engine.serve(PROMPTS)
        assert (first.digest, min(first.cached)) == (wanted, WHOLE)
        assert first.total("storage") >= 5 * (WHOLE - 64)
        engine.close()


@pytest.mark.engines_full
def test_damaged_deleted_and_full_stores_give_the_right_tokens(
    start_sglang: Start, tmp_path: Path
) -> None:
    engine = start_sglang()
    wanted = engine.serve(PROMPTS).digest

    def served(name: str, **storage: Any) -> Any:
        assert engine.flush()
        engine.attach(kvactors(tmp_path / name, **storage))
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
    full = served("full", free_space_floor=1 << 60)
    assert (full.digest, full.total("storage")) == (wanted, 0)
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
    for _ in range(8):
        found = engine.serve(PROMPTS)
        assert found.digest == wanted
        stored += found.total("storage")
        assert engine.flush()
    assert stored > 0
    engine.close()


def conversations(count: int, turns: int, seed: int) -> list[list[Prompt]]:
    """Prompts of conversations: each turn is the one before with more tokens."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        tokens: Prompt = []
        made.append([])
        for _ in range(turns):
            tokens = tokens + [draw.randrange(3, 1000) for _ in range(draw.randrange(20, 120))]
            made[-1].append(tokens)
    return made


@pytest.mark.engines_full
@pytest.mark.parametrize("interface", [1, 0])
def test_random_conversations_and_cancelled_requests(
    start_sglang: Start, tmp_path: Path, interface: int
) -> None:
    engine = start_sglang()
    wanted = [turn for one in conversations(20, 5, seed=4) for turn in one]
    random.Random(5).shuffle(wanted)
    plain = engine.serve(wanted, at_once=2).tokens
    assert engine.flush()
    engine.attach(kvactors(tmp_path / "store") | {"interface_v1": interface})
    draw = random.Random(6)
    sources = {"host": 0, "storage": 0}
    for _ in range(2):
        cancel = {i: draw.randrange(4) for i in draw.sample(range(len(wanted)), 20)}
        found = engine.serve(wanted, at_once=2, cancel=cancel)
        for i, tokens in enumerate(found.tokens):
            assert tokens == plain[i] or (tokens is None and i in cancel)
        assert None in found.tokens
        for source in sources:
            sources[source] += found.total(source)
        assert engine.flush()
    assert min(sources.values()) > 0
    engine.close()
