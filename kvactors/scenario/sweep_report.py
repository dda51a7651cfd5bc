"""The report of `kvactors sweep`: hit rate against cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.output import in_unicode, print_details, print_fields, print_rows
from kvactors.scenario.sweep import (
    Paths,
    curve_of,
    device_uses,
    hit_curve,
    optimal_hits,
    rates_of,
    read_paths,
    retain_hits,
    sizes_for,
    sizes_to_show,
)
from kvactors.scenario.trace import TraceRequest, read_trace
from kvactors.settings import Config

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Shares of the most hits possible, for which the smallest cache is reported."""

ROWS = 12
"""Sizes in the table on the terminal, unless sizes are given."""


SweepProgress = Callable[[str, float], None]


class SweepPoint(msgspec.Struct):
    """A device of one size, without other tiers."""

    blocks: int
    bytes: int | None
    hit_rate: float
    refused: int
    optimum: float
    retain: float | None = None


class SweepReport(msgspec.Struct):
    """Hit rates of tiers on a trace.

    Attributes:
        size_for: the blocks that have a share of the most hits, by share.
    """

    trace: str
    requests: int
    blocks_looked_up: int
    distinct_blocks: int
    longest_request: int
    block_bytes: int | None
    most: float
    points: list[SweepPoint]
    size_for: dict[str, int]
    tiers: dict[str, float] = msgspec.field(default_factory=dict)


def sweep(
    trace: str | Path,
    *,
    sizes: Sequence[int] = (),
    coarse: int = 1,
    limit: int = 0,
    block_bytes: int | None = None,
    config: Config | None = None,
    retain: bool = True,
    progress: SweepProgress = lambda _text, _share: None,
) -> SweepReport:
    """Hit rates of a trace by cache size.

    Args:
        sizes: of the device, in blocks. Empty: from one block to the whole trace.
        limit: see `read_trace`. A config's if there is one and this is 0.
    """
    if any(size < 1 for size in sizes):
        raise ConfigError(f"a device has at least one block, not {min(sizes)}")
    whole = True
    if config is not None:
        whole = not config.cache.recompute_last_token
    requests = list(read_trace(trace, coarse=coarse, limit=limit))
    paths = read_paths(one.ids for one in requests)
    curve = hit_curve(paths, whole=whole)
    chosen = sorted(set(sizes)) or sizes_to_show(paths.distinct)
    points = points_of(paths, chosen, block_bytes, whole=whole)
    if retain:
        run_retain(paths, requests, points, progress, whole=whole)
    return SweepReport(
        in_unicode(Path(trace).name),
        len(paths.ends),
        curve.looked_up,
        paths.distinct,
        paths.longest,
        block_bytes,
        round(curve.rate(paths.distinct), 6),
        points,
        {f"{share:g}": size for share, size in sizes_for(curve, SHARES).items()},
        {} if config is None else rates_of(paths, config),
    )


def points_of(
    paths: Paths, sizes: Sequence[int], block_bytes: int | None, *, whole: bool
) -> list[SweepPoint]:
    """Devices of some sizes under LRU, and the offline optimum of the same sizes."""
    points = []
    for size, uses in zip(sizes, device_uses(paths, sizes, whole=whole), strict=True):
        curve = curve_of(paths, uses)
        optimum = optimal_hits(uses, len(paths.ends), size) / max(1, curve.looked_up)
        points.append(
            SweepPoint(
                size,
                block_bytes and size * block_bytes,
                round(curve.rate(size), 6),
                uses.refused,
                round(optimum, 6),
            )
        )
    return points


def run_retain(
    paths: Paths,
    requests: Sequence[TraceRequest],
    points: Sequence[SweepPoint],
    progress: SweepProgress,
    *,
    whole: bool,
) -> None:
    """Run RETAIN on devices of some sizes. It is no stack algorithm: each size is a run."""
    for number, point in enumerate(points):

        def done(count: int, number: int = number, point: SweepPoint = point) -> None:
            share = (number + count / len(paths.ends)) / len(points)
            progress(f"RETAIN, {point.blocks:,} blocks", share)

        done(0)
        hits = retain_hits(paths, requests, point.blocks, whole=whole, progress=done)
        point.retain = round(hits / max(1, len(paths.blocks)), 6)


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def unit_of(count: float) -> tuple[str, int]:
    """The largest unit in which a number of bytes is at least 1, and its bytes."""
    power = 0
    while count >= 1024 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return UNITS[power], 1024**power


def bytes_text(count: int | None) -> str:
    """A size in bytes for people, empty if it is not known."""
    if count is None:
        return ""
    unit, size = unit_of(count)
    value = count / size
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def rows_of(report: SweepReport, points: Sequence[SweepPoint]) -> list[tuple[str, ...]]:
    """The cells of the table of sizes."""
    return [
        (
            f"{point.blocks:,}",
            bytes_text(point.bytes),
            f"{point.hit_rate:.4f}",
            "" if point.retain is None else f"{point.retain:.4f}",
            f"{point.optimum:.4f}",
            f"{point.hit_rate / report.most if report.most else 0.0:.1%}",
            f"{point.refused}",
        )
        for point in points
    ]


COLUMNS = ("blocks", "bytes", "LRU", "RETAIN", "optimum", "LRU of the most", "too large")


def print_sweep(report: SweepReport, console: Console, rows: int = ROWS) -> None:
    """Print the summary and a table of sizes, of `rows` rows and two more at most."""
    every = max(1, -(-len(report.points) // rows)) if len(report.points) > rows + 2 else 1
    shown = report.points[::-1][::every][::-1]
    print_fields(
        report.trace,
        [
            ("requests", f"{report.requests:,}, the largest {report.longest_request:,} blocks"),
            ("blocks looked up", f"{report.blocks_looked_up:,}"),
            ("distinct blocks", f"{report.distinct_blocks:,}"),
            ("most hits possible", f"{report.most:.4f}"),
            *[
                (
                    f"{float(share):.0%} of them",
                    f"{size:,} blocks  {bytes_text(_bytes(report, size))}",
                )
                for share, size in report.size_for.items()
            ],
        ],
        console,
    )
    cells = [(row, None) for row in rows_of(report, shown)]
    print_rows("hit rate of one tier", COLUMNS, cells, console, numbers=range(len(COLUMNS)))
    if report.tiers:
        rates = "  ".join(f"{name} {value:g}" for name, value in report.tiers.items())
        print_details(f"the config's tiers under LRU: {rates}", console)


def _bytes(report: SweepReport, blocks: int) -> int | None:
    return None if report.block_bytes is None else blocks * report.block_bytes
