"""Match and insert: 64 prompts of 8,192 tokens in groups of 8 that share 75 %, given as 64-bit
integers, names included."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvactors.bench.report import Row, bench_report, rate_row
from kvactors.native import BlockTree, Path, chain_hashes

PROMPTS, GROUP_SIZE, LENGTH, SHARED = 64, 8, 8192, 0.75
ROOT = bytes(32)
SGLANG = 233.0
SGLANG_NAME = "SGLang's Rust tree on the same workload, no names (published)"

Prompts = list[NDArray[np.int64]]


def prompts(rng: np.random.Generator, count: int, length: int) -> Prompts:
    """Prompts in groups that share their beginning. The groups are of one size at any count, so
    that runs of few long prompts and of many short ones have as many new tokens."""
    groups = [rng.integers(0, 150_000, int(length * SHARED)) for _ in range(count // GROUP_SIZE)]
    rest = length - int(length * SHARED)
    return [
        np.concatenate([groups[i % len(groups)], rng.integers(0, 150_000, rest)])
        for i in range(count)
    ]


def insert(tree: BlockTree, batch: Prompts, block_size: int) -> None:
    """Match each prompt, give the missing blocks ids, make them shareable, let go."""
    for tokens in batch:
        path = Path(block_size, ROOT)
        path.extend(tokens)
        run, _ = tree.pin(path)
        blocks = path.num_full_blocks
        path.assign(run, range(blocks - run))
        tree.commit(path, blocks)
        tree.release(path)


def rate(block_size: int, length: int, count: int, filled: int, rounds: int) -> float:
    """Median million tokens a second over fresh prompts, with `filled` blocks in the
    index before."""
    rng = np.random.default_rng(7)
    per_round = count * (length // block_size)
    results = []
    tree = BlockTree(block_size, filled + per_round * (rounds + 1))
    while tree.statistics()["nodes"] < filled:
        insert(tree, [rng.integers(0, 150_000, LENGTH)], block_size)
    for _ in range(rounds):
        if not filled:
            tree = BlockTree(block_size, per_round + 1024)
        batch = prompts(rng, count, length)
        began = time.perf_counter()
        insert(tree, batch, block_size)
        results.append(count * length / (time.perf_counter() - began) / 1e6)
    return median(results)


def naming_rate(block_size: int, rounds: int) -> float:
    """Median million tokens a second of naming alone, every block of every prompt."""
    batch = prompts(np.random.default_rng(7), PROMPTS, LENGTH)
    results = []
    for _ in range(rounds):
        began = time.perf_counter()
        for tokens in batch:
            chain_hashes(ROOT, tokens, block_size)
        results.append(PROMPTS * LENGTH / (time.perf_counter() - began) / 1e6)
    return median(results)


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: small sizes, for tests."""
    rounds, filled, long = (1, 4096, 16_384) if quick else (9, 1_000_000, 131_072)
    rows: list[Row] = []
    unit = "M tokens/s"
    for block_size in (64, 16):
        empty = rate(block_size, LENGTH, PROMPTS, 0, rounds)
        naming = naming_rate(block_size, rounds)
        rows.append(rate_row(f"block {block_size}, empty index", empty, SGLANG, unit, SGLANG_NAME))
        rows.append(
            rate_row(
                f"block {block_size}, empty index, beside naming",
                empty,
                naming,
                unit,
                "naming every block, same run",
            )
        )
        full = rate(block_size, LENGTH, PROMPTS, filled, rounds)
        rows.append(
            rate_row(
                f"block {block_size}, {filled:,} blocks before", full, SGLANG, unit, SGLANG_NAME
            )
        )
        longer = rate(block_size, long, GROUP_SIZE, 0, rounds)
        rows.append(
            rate_row(
                f"block {block_size}, {long:,}-token prompts",
                longer,
                empty,
                unit,
                "8,192-token prompts, same run",
            )
        )
    settings = {
        "prompts": PROMPTS,
        "tokens": LENGTH,
        "group_size": GROUP_SIZE,
        "shared": SHARED,
        "rounds": rounds,
        "quick": quick,
    }
    return bench_report("index", rows, settings)
