"""Reader of Prometheus' text format, version 0.0.4, of the metrics whose names begin with
`kvactors:`.

The text comes from another process: any of it may be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise

from kvactors.errors import KVActorsError
from kvactors.observe.families import PREFIX

LABEL = r'[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"'
LINE = re.compile(
    rf"(?P<name>[a-zA-Z_:][\w:]*)(?:\{{(?P<labels>(?:{LABEL}(?:,{LABEL})*,?)?)\}})?"
    r"[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?[ \t]*",
    re.ASCII,
)
PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
ESCAPE = re.compile(r"\\(.)")
ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}

Labels = Mapping[str, str]
Buckets = tuple[tuple[float, float], ...]
"""Upper bounds and cumulative counts of a histogram, ascending."""


class BadMetrics(KVActorsError):
    """The metrics of a process cannot be read."""


class Metrics:
    """Samples by name and labels.

    Args:
        samples: finite values by name, each with its labels.
    """

    def __init__(self, samples: Mapping[str, list[tuple[Labels, float]]]) -> None:
        self._samples = samples

    def __contains__(self, name: str) -> bool:
        """Whether there is a sample of a metric."""
        return PREFIX + name in self._samples

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels, None if there are none."""
        found = [
            value
            for has, value in self._samples.get(PREFIX + name, ())
            if all(has.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a metric by a label, in the order of the text."""
        found = dict[str, float]()
        for labels, value in self._samples.get(PREFIX + name, ()):
            if label in labels:
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found

    def labels(self, name: str) -> Labels:
        """The labels of the first sample of a metric, none if there is no sample."""
        found = self._samples.get(PREFIX + name)
        return found[0][0] if found else {}

    def buckets(self, name: str, **labels: str) -> Buckets:
        """The buckets of a histogram, those of all samples with these labels added up."""
        found = dict[float, float]()
        for has, value in self._samples.get(f"{PREFIX}{name}_bucket", ()):
            if all(has.get(label) == wanted for label, wanted in labels.items()):
                try:
                    bound = float(has["le"])
                except (KeyError, ValueError) as error:
                    raise BadMetrics(f"a bucket of {PREFIX}{name} has no bound") from error
                found[bound] = found.get(bound, 0.0) + value
        return tuple(sorted((bound, count) for bound, count in found.items() if bound == bound))

    def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """The samples that only grow while a process runs."""
        return {
            (name, tuple(sorted(labels.items()))): value
            for name, samples in self._samples.items()
            if name.endswith(("_total", "_count", "_bucket"))
            for labels, value in samples
        }


def read_metrics(text: str) -> Metrics:
    """The metrics of a text.

    Args:
        text: an exposition. Metrics of other programs are passed over.

    Raises:
        BadMetrics: a line is not of the format, or no metric is of kvactors.
    """
    found = dict[str, list[tuple[Labels, float]]]()
    others = 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        try:
            value = float(match["value"]) if match else math.nan
        except ValueError:
            match = None
        if match is None:
            raise BadMetrics(f"line {number} is no metric: {line[:60]!r}")
        name = match["name"]
        if not name.startswith(PREFIX):
            others += 1
        elif math.isfinite(value):
            labels = {key: _unescaped(text) for key, text in PAIR.findall(match["labels"] or "")}
            found.setdefault(name, []).append((labels, value))
    if not found:
        raise BadMetrics(f"no metric begins with {PREFIX} (there are {others} others)")
    return Metrics(found)


def _unescaped(text: str) -> str:
    return ESCAPE.sub(lambda match: ESCAPES.get(match[1], match[1]), text)


def grown(now: Buckets, before: Buckets) -> Buckets:
    """The counts of now, less those of an earlier reading."""
    earlier = dict(before)
    return tuple((bound, max(0.0, count - earlier.get(bound, 0.0))) for bound, count in now)


def quantile(buckets: Buckets, share: float) -> float | None:
    """A quantile by linear interpolation within its bucket, as Prometheus computes it.

    A quantile above the highest finite bound is that bound.

    Args:
        buckets: of a histogram.
        share: of the values, 0 to 1.

    Returns:
        None if there are no values.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    for (low, below), (high, count) in pairwise(((0.0, 0.0), *buckets)):
        if count >= rank:
            if math.isinf(high):
                return low
            part = (rank - below) / (count - below) if count > below else 1.0
            return low + (high - low) * min(1.0, max(0.0, part))
    return buckets[-1][0]
