"""Prometheus' text format as `kvactors top` reads it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvactors.observe.families import FAMILIES
from kvactors.top.exposition import BadMetrics, grown, quantile, read_metrics
from kvactors.top.view import Reading, Readings
from tests.cache.test_degraded import HOST, STORE, requests
from tests.support.cache import opened


def test_a_real_exposition_is_read_as_prometheus_client_reads_it():
    from kvactors.metrics import CacheMetrics
    from kvactors.testing.loop import simulate

    async def main():
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            metrics = CacheMetrics(cache)
            await requests(cache, 1, 2, 1)
            return metrics.render().decode()

    text = simulate(main, 1)
    found = read_metrics(text)
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    assert len(samples) > 300
    for sample in samples:
        name = sample.name.removeprefix("kvactors:")
        assert found.value(name, **sample.labels) == sample.value
    assert {one.name for one in FAMILIES if one.kind == "gauge"} - {
        name for name in (one.name for one in FAMILIES) if name in found
    } <= {"rank_healthy", "degraded", "tenant_blocks", "tenant_quota_blocks"}
    view = Readings()
    view.add(Reading(0.0, found, None))
    assert view.view("u", 0.0).status == "ok"


@given(st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False)))
def test_every_label_and_value_is_read_as_it_was_written(samples):
    registry = CollectorRegistry()
    gauge = Gauge("kvactors:x", "text", ["one", "two"], registry=registry)
    for label, value in samples.items():
        gauge.labels(label, '}, b="\\').set(value)
    found = read_metrics(generate_latest(registry).decode() + "kvactors:up 1\n")
    assert found.by("x", "one") == samples


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "<html>404</html>",
        "other_metric 1\n",
        "kvactors:up\n",
        "kvactors:up one\n",
        'kvactors:up{tier="device} 1\n',
        "kvactors:up{tier=device} 1\n",
        "kvactors:up 1 2 3\n",
        '{"status": "ok"}',
        "\x00\x01",
    ],
)
def test_other_texts_are_refused_by_name(text):
    with pytest.raises(BadMetrics, match=r"is no metric|no metric begins with kvactors:"):
        read_metrics(text)


def test_values_that_are_not_finite_are_left_out():
    found = read_metrics('kvactors:up NaN\nkvactors:tier_blocks{tier="host"} +Inf\nkvactors:a 1\n')
    assert found.value("up") is None
    assert found.value("tier_blocks") is None
    assert found.value("a") == 1


def test_a_bucket_without_a_bound_is_refused_by_name():
    for labels in ("", '{le="x"}'):
        with pytest.raises(BadMetrics, match="a bucket of kvactors:a has no bound"):
            read_metrics(f"kvactors:a_bucket{labels} 1\n").buckets("a")


def test_quantiles_are_interpolated_as_prometheus_does():
    buckets = ((0.1, 10.0), (1.0, 30.0), (math.inf, 40.0))
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 0.5) == pytest.approx(0.55)
    assert quantile(buckets, 0.99) == 1.0  # above the last finite bound
    assert quantile((), 0.5) is None
    assert quantile(((1.0, 0.0), (math.inf, 0.0)), 0.5) is None
    assert grown(buckets, ((0.1, 4.0), (1.0, 30.0))) == ((0.1, 6.0), (1.0, 0.0), (math.inf, 40.0))
