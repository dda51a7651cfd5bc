"""The report of a sweep: its figures, its table, its chart, its page."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.pages import sweep_chart, sweep_page
from kvactors.scenario.replay import ReplayConfig, replay
from kvactors.scenario.sweep import print_sweep, sweep

TRACE = [[0, 1, 2], [0, 1, 3, 4], [5], [0, 1, 2, 6, 7, 8], [0, 1, 3, 4], [5, 9], [0, 1, 2, 6]] * 3
TABLES = {
    "cache": {"block_size": 4, "model": "m", "recompute_last_token": False},
    "device": {"num_blocks": 6, "policy": "lru"},
    "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"},
}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t<b>.jsonl"  # a name that a page must escape
    path.write_text(
        "".join(json.dumps({"timestamp": i, "hash_ids": ids}) + "\n" for i, ids in enumerate(TRACE))
    )
    return path


def test_sizes_that_are_asked_for_and_the_whole_range(trace):
    given = sweep(trace, sizes=[6, 4, 6])
    assert [point.blocks for point in given.points] == [4, 6]
    assert [point.refused for point in given.points] == [3, 0]
    every = sweep(trace)
    assert every.points[-1].blocks == every.distinct_blocks == 10
    assert every.points[-1].hit_rate == every.most == given.most
    assert (every.requests, every.blocks_looked_up, every.longest_request) == (21, 72, 6)
    for point in every.points:
        assert point.bytes is None
        assert max(point.hit_rate, point.retain) <= point.optimum
    assert list(sweep_chart(every).lines) == ["LRU", "RETAIN", "offline optimum", "most possible"]
    assert sweep_chart(every).x_label == "blocks"
    least = sweep(trace, sizes=[4], block_bytes=1000, retain=False)
    assert (least.points[0].bytes, least.points[0].retain) == (4000, None)
    assert "RETAIN" not in sweep_chart(least).lines
    assert sweep_chart(least).x_label == "KiB"


def test_the_progress_of_a_sweep_rises_to_its_end(trace):
    seen = []
    sweep(trace, sizes=[4, 6, 8], progress=lambda text, share: seen.append((text, share)))
    assert [text for text, _ in seen] == [f"RETAIN, {size} blocks" for size in (4, 6, 8)]
    assert [share for _, share in seen] == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("store", [{"capacity_blocks": 3}, {}])
@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
async def test_the_tiers_of_a_config_hit_as_its_replay(trace, store, mode):
    policy = {"write_policy": "write_through"}
    if mode == "exclusive":
        policy = {"write_policy": "write_back", "exclusive": "capacity_blocks" in store}
    config = ReplayConfig.from_mapping(
        {
            **TABLES,
            "host": {"slots": 7 if mode == "inclusive" else 1, "mode": mode},
            "storage": {"backend": "memory", **policy, **store},
        }
    )
    report = sweep(trace, config=config)
    real = await replay(trace, config)
    assert {k: report.tiers[k] for k in real.hit_rate} == pytest.approx(real.hit_rate, abs=2e-6)
    assert report.tiers["refused"] == real.rejected == 0


def test_the_table_has_every_size_that_is_asked_for(trace):
    for sizes in ([], [1, 2, 3, 4], list(range(1, 40))):
        report = sweep(trace, sizes=sizes, block_bytes=4096)
        out = io.StringIO()
        print_sweep(report, Console(file=out, width=160))
        assert f"{report.points[-1].hit_rate:.4f}" in out.getvalue()


def test_columns_that_are_empty_in_every_row_are_left_out(trace):
    out = Console(file=io.StringIO(), width=160)
    print_sweep(sweep(trace, sizes=[6], retain=False), out)
    head = next(line for line in out.file.getvalue().splitlines() if "optimum" in line)
    assert re.findall(r"\w[\w ]*\w", head) == ["blocks", "LRU", "optimum", "LRU of the most"]


class Tags(HTMLParser):
    """Open tags, which must be closed in their order, and addresses."""

    VOID = ("meta", "link", "path", "use", "rect", "br")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_is_whole_escaped_and_needs_no_network(trace):
    config = ReplayConfig.from_mapping(TABLES)
    page = sweep_page(sweep(trace, config=config, block_bytes=64))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(address.startswith(("#", "data:")) for address in tags.addresses)
    assert "@import" not in page
    assert "url(http" not in page
    assert "t<b>.jsonl" not in page
    assert "Sweep of t<b>.jsonl" in tags.text  # the parser unescapes it
    assert any("tiers under LRU" in text for text in tags.text)


@pytest.mark.parametrize("sizes", [[0], [4, -1]])
def test_sizes_below_one_block_are_refused(trace, sizes):
    with pytest.raises(ConfigError, match="at least one block"):
        sweep(trace, sizes=sizes)
