"""kvactors inside the whole SGLang engine, as HiCache storage and as linker: the tokens are those
that SGLang computes without it.

The storage is attached to running engines and detached again, since most of a case's time is the
start of the engine.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.interop.engines import stores
from tests.interop.engines.conftest import known
from tests.interop.engines.sglang_engine import (
    ENVIRONMENT,
    VARIABLES,
    SglangEngine,
    kvactors,
    linker,
)
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import Prompt, Tokens, prompts
from tests.interop.environments import Environments, InteropError

pytestmark = pytest.mark.engines

Start = Callable[..., SglangEngine]

PROMPTS = prompts(6)
"""51 pages together: more than the device pool of 26 pages holds."""
WHOLE = 288
"""Tokens of a prompt of 320 that must come from a cache: all but the last page's."""


@pytest.fixture
def start_sglang(environments: Environments, tmp_path: Path) -> Iterator[Start]:
    """Starts SGLang engines with the tiny model. The arguments are those of `SglangEngine`."""
    model = write_model(tmp_path / "model")
    logs = itertools.count()
    with ExitStack() as ends:

        def start_one(extra: dict[str, Any] | None = None, **options: Any) -> SglangEngine:
            log = tmp_path / f"engine-{next(logs)}.log"
            engine = SglangEngine(environments, model, log, extra, **options)
            ends.callback(engine.discard)
            return engine

        yield start_one


def alone(start: Start, wanted: list[Prompt] = PROMPTS, **settings: Any) -> Any:
    """The tokens that SGLang computes for prompts without kvactors. The tests of a session share
    them, as they depend on the machine only. `settings`: of the engine."""

    def serve() -> Tokens:
        engine = start(hicache=False, **settings)
        at_once = settings.get("max_running_requests", 1)
        tokens = engine.serve(wanted, at_once=at_once).tokens
        engine.close()
        return tokens

    return known("sglang", [wanted, sorted(settings.items())], serve)


def comes_whole(engine: SglangEngine, wanted: Tokens, source: str) -> None:
    """The prompts have the right tokens, and come from a source."""
    found = engine.serve(PROMPTS)
    assert (found.tokens, min(found.cached)) == (wanted, WHOLE)
    assert found.total(source) >= 5 * (WHOLE - 64)


def test_hits_from_every_tier_after_kill_9_and_a_store_without_checksums(
    start_sglang: Start, tmp_path: Path
) -> None:
    engine = start_sglang()
    assert engine.opened["version"] == "0.5.23"
    plain = engine.serve(PROMPTS)
    wanted = plain.tokens
    assert max(plain.cached) <= 64  # computed: only the common prefix was cached
    assert len({tuple(tokens or ()) for tokens in wanted}) == len(PROMPTS)
    assert known("sglang", [PROMPTS, []], lambda: wanted) == wanted
    assert engine.flush()
    extra = kvactors(tmp_path / "store")
    # settings that cannot be used are named, and leave SGLang without a storage
    with pytest.raises(InteropError, match="unknown key 'directory'"):
        engine.attach(extra | {"directory": "x"})
    engine.attach(extra)
    assert engine.serve(PROMPTS).tokens == wanted
    host = engine.serve(PROMPTS)
    assert (host.tokens, min(host.cached)) == (wanted, WHOLE)
    assert host.total("host") > 0
    assert host.total("storage") == 0

    def reopen(extra: dict[str, Any], backend: str = "dynamic") -> None:
        assert engine.flush()
        engine.detach()
        engine.attach(extra, backend)

    assert engine.flush()
    comes_whole(engine, wanted, "storage")
    reopen(extra)
    comes_whole(engine, wanted, "storage")
    # the pages of other weights under the same path
    for seed, found in ((6, False), (5, True)):
        write_model(tmp_path / "model", seed)
        reopen(extra)
        assert bool(engine.serve(PROMPTS).total("storage")) is found
    assert engine.clear_storage()
    assert engine.flush()
    cleared = engine.serve(PROMPTS)
    assert (cleared.tokens, cleared.total("storage")) == (wanted, 0)
    # flipped bits in kvactors' store are misses
    assert engine.flush()
    engine.detach()
    stores.flip(tmp_path / "store")
    engine.attach(extra)
    flipped = engine.serve(PROMPTS)
    assert (flipped.tokens, flipped.total("storage")) == (wanted, 0)
    # negative control: in a store without checksums they are other tokens
    reopen({"prefetch_threshold": 32, "file_storage_path": str(tmp_path / "unverified")}, "file")
    assert engine.serve(PROMPTS).tokens == wanted
    assert engine.flush()
    right = engine.serve(PROMPTS)
    assert (right.tokens, right.total("storage") > 0) == (wanted, True)
    stores.flip(tmp_path / "unverified", "*.bin")
    assert engine.flush()
    control = engine.serve(PROMPTS)
    assert control.total("storage") > 0
    assert control.tokens != wanted
    # kill -9, and a new engine that opens the store at its start
    reopen(extra)
    assert engine.serve(PROMPTS).tokens == wanted
    assert engine.flush()
    assert engine.serve(PROMPTS).total("storage") > 0
    engine.kill()
    engine = start_sglang(extra)
    comes_whole(engine, wanted, "storage")
    engine.close()


def test_the_linker_brings_pages_from_host_and_storage(start_sglang: Start, tmp_path: Path) -> None:
    wanted = alone(start_sglang)
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


WINDOWS = {
    "architectures": ["MellumForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
}
"""The tiny model with windows of two pages in half of its layers."""


def test_the_linker_brings_windows_too(start_sglang: Start, tmp_path: Path) -> None:
    engine = start_sglang(
        json_model_override_args=json.dumps(WINDOWS), **linker(100, tmp_path / "store")
    )
    assert engine.logged("(swa)") == 1
    plain = engine.serve(PROMPTS)
    assert max(plain.cached) <= 64
    assert len({tuple(tokens or ()) for tokens in plain.tokens}) == len(PROMPTS)
    for flush in (False, True):  # from the host tier, and from storage
        assert not flush or engine.flush()
        found = engine.serve(PROMPTS)
        assert (found.tokens, min(found.cached)) == (plain.tokens, WHOLE)
    assert engine.flush()
    stores.flip(tmp_path / "store")
    flipped = engine.serve(PROMPTS)
    assert (flipped.tokens, max(flipped.cached) <= 64) == (plain.tokens, True)
    engine.close()


@pytest.mark.engines_full
def test_the_trees_and_host_pools_of_sglangs_test_kit(
    environments: Environments, tmp_path: Path
) -> None:
    """`sglang_units_inner.py`, in SGLang's environment."""
    shutil.copy(Path(__file__).with_name("sglang_units_inner.py"), tmp_path / "test_units.py")
    plain = ["-q", "-x", "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [environments.program(ENVIRONMENT), "-m", "pytest", *plain, "test_units.py"],
        cwd=tmp_path,
        env=os.environ | VARIABLES | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1].startswith("89 passed")


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
@pytest.mark.parametrize(("adapter", "count"), [("hicache", 40), ("linker", 40), ("windows", 16)])
def test_random_conversations_with_retraction_and_cancelled_requests(
    start_sglang: Start, tmp_path: Path, adapter: str, count: int
) -> None:
    """`windows`: the linker, below a model that has them."""
    wanted = [turn for one in conversations(count, 5, seed=4) for turn in one]
    random.Random(5).shuffle(wanted)
    settings: dict[str, Any] = dict(PRESSURE)
    if adapter == "windows":
        settings["json_model_override_args"] = json.dumps(WINDOWS)
    plain = alone(start_sglang, wanted, **settings)
    if adapter != "hicache":
        settings |= linker(60, tmp_path / "store")
    engine = start_sglang(variables=RETRACTION, **settings)
    if adapter == "hicache":
        engine.attach(kvactors(tmp_path / "store"))
    draw = random.Random(6)
    sources = {"host": 0, "storage": 0}
    for _ in range(2):
        cancel = {i: draw.randrange(8) for i in draw.sample(range(len(wanted)), 40)}
        found = engine.serve(wanted, at_once=4, cancel=cancel)
        for i, tokens in enumerate(found.tokens):
            assert tokens == plain[i] or (tokens is None and i in cancel)
        assert None in found.tokens
        for source in sources:
            sources[source] += found.total(source)
        assert engine.flush()
    assert sources["host"] > 0
    assert adapter != "hicache" or sources["storage"] > 0
    assert engine.logged(RETRACTED) > 0
    engine.close()
