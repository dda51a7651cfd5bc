"""The report of `bench store`: rows, spreads and rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from kvactors.bench.report import Row, rate_row, time_row
from kvactors.bench.store_rounds import PLAIN, Measured, Round

PEER = "vLLM's fs tier, nothing verified"
DISK = "plain O_DIRECT threads, best of"


def rows_of(found: Measured) -> list[Row]:
    """Rows of a load: medians of both directions beside the disk and vLLM's tier."""
    rows = []
    for i, what in enumerate(("write", "read")):
        case = f"{found.load.case}, {what}"
        mine = statistics.median(one[i] for one in found.ours) / 1e6
        by_name = {name: statistics.median(r[i] for r in of) for name, of in found.plain.items()}
        best = max(by_name, key=lambda name: by_name[name])
        rows.append(
            rate_row(case, mine, by_name[best] / 1e6, "MB/s", f"{DISK} {len(PLAIN)}: {best}")
        )
        if found.vllm:
            theirs = statistics.median(one[i] for one in found.vllm) / 1e6
            rows.append(rate_row(f"{case}, beside vLLM", mine, theirs, "MB/s", PEER))
            cost, theirs = (
                statistics.median(one[2 + i] for one in of) for of in (found.ours, found.vllm)
            )
            rows.append(time_row(f"{case}, processor time", cost, theirs, "s/GB", PEER))
    return rows


def by_runner(found: Measured) -> dict[str, list[Round]]:
    """Rounds of each runner, by its name."""
    return {"ours": found.ours, "vLLM's": found.vllm, **found.plain}


def spread_of(found: Measured) -> dict[str, str]:
    """The least and the most GB/s of every runner, by direction, the ratios of the same rounds, and
    the processor seconds for a GB."""
    return {
        f"{found.load.case}, {what}": ", ".join(
            [
                *(
                    f"{name} {min(r[i] for r in of) / 1e9:.2f} to {max(r[i] for r in of) / 1e9:.2f}"
                    f" ({statistics.median(r[2 + i] for r in of):.3f} s/GB)"
                    for name, of in by_runner(found).items()
                    if of
                ),
                *ratios_of(found, i),
            ]
        )
        for i, what in enumerate(("write", "read"))
    }


def ratios_of(found: Measured, i: int) -> list[str]:
    """Ours beside the best plain threads and beside vLLM's tier in the same round: the median, the
    least and the most."""
    best = [max(one[i] for one in of) for of in zip(*found.plain.values(), strict=True)]
    shown = []
    for name, limits in (("the disk", best), ("vLLM's", [one[i] for one in found.vllm])):
        if limits:
            of = [mine[i] / limit for mine, limit in zip(found.ours, limits, strict=True)]
            shown.append(
                f"of {name} {statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f}) by round"
            )
    return shown


def rounds_of(found: Measured) -> dict[str, dict[str, list[dict[str, float]]]]:
    """All rounds of a load: bytes a second and processor seconds for a GB, by runner."""
    return {
        found.load.case: {
            name: [one._asdict() for one in of] for name, of in by_runner(found).items() if of
        }
    }


def counted(counts: Mapping[str, int]) -> str:
    """How many rounds each load had: the usual number, and the loads with another one."""
    if not counts:
        return "0"
    usual = max(counts.values())
    fewer = [f"{case} {count}" for case, count in counts.items() if count != usual]
    return f"{usual} ({', '.join(fewer)})" if fewer else str(usual)
