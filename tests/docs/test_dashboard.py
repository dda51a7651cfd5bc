"""The dashboard and the demo: names agree with the collector's, the JSON fits Grafana's schema, and
every query gives results on a real Prometheus that scrapes the demo."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from kvactors.observe.metrics import FAMILIES, PREFIX

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvactors.json"
LIMIT = 120.0
"""Seconds that only bound a hang."""

NO_DATA = {"rank_healthy"}
"""Metrics that the demo does not have: it has no ranks."""


def dashboard():
    return json.loads(DASHBOARD.read_text("utf-8"))


def queries():
    return [
        (panel["title"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def exposed_names():
    """Names of all samples, with the labels that each may have."""
    found = {f"{PREFIX}up": set()}
    for family in FAMILIES:
        name, labels = PREFIX + family.name, set(family.labels)
        match family.kind:
            case "counter":
                found[f"{name}_total"] = labels
            case "histogram":
                found |= {f"{name}_sum": labels, f"{name}_count": labels}
                found[f"{name}_bucket"] = labels | {"le"}
            case _:
                found[name] = labels
    return found


def test_every_query_uses_names_and_labels_of_the_collector():
    exposed = exposed_names()
    assert len(queries()) > 20
    used = set()
    for title, expression in queries():
        names = re.findall(r"kvactors:\w+", expression)
        assert names, title
        assert set(names) <= set(exposed), title
        labels = set().union(*(exposed[name] for name in names)) | {"instance"}
        by = re.findall(r"(?:by|ignoring) \(([^)]*)\)", expression)
        grouped = {label.strip() for group in by for label in group.split(",")}
        matched = set(re.findall(r"(\w+)=~?\"", expression))
        assert grouped | matched <= labels, title
        used |= set(names)
    assert {f"{PREFIX}{name}_total" for name in ("prefix_cache_hits", "blocks_evicted")} <= used


@pytest.mark.ci
def test_the_dashboard_fits_grafanas_schema():
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    page = dashboard()
    back = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(page)))

    def kept(before, after, where):
        """Fields that the schema lacks are missing in the text that it is written to."""
        if isinstance(before, dict):
            for name, value in before.items():
                assert name in after, f"{where}.{name}"
                kept(value, after[name], f"{where}.{name}")
        elif isinstance(before, list):
            for position, (one, other) in enumerate(zip(before, after, strict=True)):
                kept(one, other, f"{where}[{position}]")
        else:
            assert before == after, where

    kept(page, back, "dashboard")


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def wait_until(condition):
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


@pytest.mark.ci
def test_every_query_gives_results_on_a_real_prometheus(tmp_path, unused_tcp_port_factory):
    prometheus = shutil.which("prometheus")
    assert prometheus, "install Debian's package prometheus"
    port, web = unused_tcp_port_factory(), unused_tcp_port_factory()
    settings = (DEPLOY / "prometheus.yml").read_text("utf-8")
    settings = settings.replace("demo:9464", f"127.0.0.1:{port}").replace("5s", "1s")
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    file = tmp_path / "prometheus.yml"
    file.write_text(settings)
    demo = subprocess.Popen([sys.executable, DEPLOY / "demo" / "demo.py", "--port", str(port)])
    command = [prometheus, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{web}"], stderr=log)
    api = f"http://127.0.0.1:{web}/api/v1"

    def asked(expression):
        for name, value in {"$instance": ".*", "$__rate_interval": "5s"}.items():
            expression = expression.replace(name, value)
        url = f"{api}/query?{urllib.parse.urlencode({'query': expression})}"
        return fetch(url)

    def rates():
        """Whether there are two scrapes of a cache that has evicted blocks."""
        try:
            found = asked(f"rate({PREFIX}blocks_evicted_total{{tier='device'}}[$__rate_interval])")
        except OSError:
            return False
        return any(float(one["value"][1]) > 0 for one in found["data"]["result"])

    try:
        wait_until(rates)
        for title, expression in queries():
            found = asked(expression)
            assert found["status"] == "success", title
            if not any(name in expression for name in NO_DATA):
                assert found["data"]["result"], f"{title}: {expression}"
        (target,) = fetch(f"{api}/targets")["data"]["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        promtool = shutil.which("promtool")
        if promtool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read()
            done = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, check=False
            )
            assert done.returncode in (0, 3), done.stderr  # 3: remarks on style
    finally:
        log.close()
        for process in (server, demo):
            process.terminate()
            process.wait(30)
