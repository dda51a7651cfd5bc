"""The report of the benchmark `store`: rows, spreads and rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from tests.benchmarks.report import Row, rate_row, time_row
from tests.benchmarks.store_rounds import PLAIN, Measured, Round

PEER = "vLLM's fs tier, nothing verified"
DISK = f"plain O_DIRECT threads, best of {len(PLAIN)}:"


class Limit(NamedTuple):
    """The best plain threads of a load in a direction.

    Attributes:
        rate: the median of their rounds.
        ratio: the median of ours beside theirs in the same round.
        name: the variant that was chosen most often.
    """

    rate: float
    ratio: float
    name: str


def limit_of(ours: Sequence[float], plain: Mapping[str, Sequence[float]]) -> Limit:
    """The best of several variants of plain threads.

    The best of several noisy medians is above what any variant has on average, even if all are
    equal. So half of the rounds choose the variant, and the other half give its figures. The limit
    is the median over all ways to halve the rounds.

    Args:
        ours: rates by round.
        plain: rates of each variant, by round.
    """
    rounds = range(len(ours))
    rates, ratios, names = [], [], []
    for half in combinations(rounds, len(ours) // 2):
        judges = [i for i in rounds if i not in half]
        name = max(
            plain, key=lambda name: statistics.median(plain[name][i] for i in half or rounds)
        )
        names.append(name)
        rates.append(statistics.median(plain[name][i] for i in judges))
        ratios.append(statistics.median(ours[i] / plain[name][i] for i in judges))
    return Limit(
        statistics.median(rates), statistics.median(ratios), Counter(names).most_common(1)[0][0]
    )


def disk_of(found: Measured, i: int) -> Limit:
    """The best plain threads of a load in a direction."""
    return limit_of(
        [one[i] for one in found.ours],
        {name: [one[i] for one in of] for name, of in found.plain.items()},
    )


def rows_of(found: Measured) -> list[Row]:
    """Rows of a load: medians of both directions beside the disk and vLLM's tier."""
    rows = []
    for i, what in enumerate(("write", "read")):
        case = f"{found.load.case}, {what}"
        mine = statistics.median(one[i] for one in found.ours) / 1e6
        disk = disk_of(found, i)
        rows.append(rate_row(case, mine, disk.rate / 1e6, "MB/s", f"{DISK} {disk.name}"))
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
    least and the most. Of plain threads the least and the most beside the variant of the row."""
    disk = disk_of(found, i)
    shown = []
    for name, of in (("the disk", found.plain[disk.name]), ("vLLM's", found.vllm)):
        if of:
            ratios = [mine[i] / one[i] for mine, one in zip(found.ours, of, strict=True)]
            middle = disk.ratio if of is not found.vllm else statistics.median(ratios)
            shown.append(
                f"of {name} {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) by round"
            )
    return shown


def counted(counts: Mapping[str, int]) -> str:
    """How many rounds each load had: the usual number, and the loads with another one."""
    if not counts:
        return "0"
    usual = max(counts.values())
    fewer = [f"{case} {count}" for case, count in counts.items() if count != usual]
    return f"{usual} ({', '.join(fewer)})" if fewer else str(usual)
