"""Decode steps: running requests of different lengths get a token each, beside vLLM's
`allocate_slots` and SGLang's batch allocation in processes of their Pythons.

A step of ours and of vLLM shares the blocks that it fills. SGLang's does not touch its tree before
the end of a request. Processor time of the least disturbed of many rounds, which take turns.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import ExitStack

import kvactors
from kvactors import Lease, Step
from tests.benchmarks.decode_child import STEPS, prompts, tokens_of
from tests.benchmarks.frame import ENGINE_VARIABLES, ROOT, Peer, Report, Row, time_row

SIZES = ((64, 16), (64, 64), (256, 16), (256, 64))
"""Requests, and tokens of a block."""
BARS_US = {64: 1.2, 256: 0.8}
"""Of a request and step, by requests."""
ROUNDS = 9
VARIABLES = {
    "vllm": ENGINE_VARIABLES,
    "sglang": {
        "PYTHONPATH": f"{ROOT / 'tests/interop/engines/sglang_site'}:{ROOT}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    },
}
PEERS = {"vllm": "vLLM's allocate_slots", "sglang": "SGLang's alloc_decode"}


async def step_all(cache: kvactors.KVCache, leases: list[Lease], row: list[int]) -> None:
    """A step in one call."""
    steps = [Step(one, (token,), one.num_tokens) for one, token in zip(leases, row, strict=True)]
    for outcome in await cache.step(steps):
        if outcome.error is not None:
            raise outcome.error


async def measure(requests: int, block: int) -> float:
    """Processor seconds of all steps of a round."""
    first = prompts(requests)
    config = kvactors.Config.from_mapping(
        {
            "cache": {"block_size": block},
            "device": {"num_blocks": sum((len(one) + STEPS) // block + 2 for one in first)},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1},
        }
    )
    async with kvactors.open(config) as cache:
        leases = []
        for number, tokens in enumerate(first):
            leases.append(lease := await cache.acquire(str(number), tokens))
            await lease.commit(len(tokens))
        rows = tokens_of(requests)
        gc.collect()
        gc.freeze()
        began = time.process_time()
        for row in rows:
            await step_all(cache, leases, row)
        took = time.process_time() - began
        gc.unfreeze()
        for lease in leases:
            await lease.finish()
    return took


def run(*, quick: bool = False, vllm_python: str = "", sglang_python: str = "") -> Report:
    """All rows. Without a Python of a peer there are no rows beside it."""
    rounds, pythons = 2 if quick else ROUNDS, {"vllm": vllm_python, "sglang": sglang_python}
    with ExitStack() as stack:
        peers = {}
        for name in [name for name, python in pythons.items() if python]:
            peers[name] = Peer(pythons[name], "decode_child.py", name, variables=VARIABLES[name])
            stack.callback(peers[name].close)
        rows: list[Row] = []
        for requests, block in SIZES:
            found: dict[str, list[float]] = {name: [] for name in ("step", *peers)}
            for _ in range(rounds):
                found["step"].append(asyncio.run(measure(requests, block)))
                for name, peer in peers.items():
                    found[name].append(peer.ask("round", requests=requests, block=block)["seconds"])
            least = {name: min(took) / STEPS / requests * 1e6 for name, took in found.items()}
            case = f"{requests} requests, block {block}, step"
            rows.append(time_row(case, least["step"], BARS_US[requests], "us", "the bar"))
            rows += [
                time_row(case, least["step"], least[name], "us", PEERS[name]) for name in peers
            ]
    return Report(rows, {"steps": STEPS, "rounds": rounds, "quick": quick})
