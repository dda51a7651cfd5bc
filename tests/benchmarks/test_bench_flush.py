"""The benchmark of the flush path runs, and the time of an evicted run grows linearly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvactors.errors import ConfigError
from tests.benchmarks import flush

pytestmark = pytest.mark.full


def test_a_quick_run_reports_in_the_common_form():
    report = flush.run(quick=True)
    assert (report["name"], report["settings"]["quick"]) == ("flush", True)
    assert report["settings"]["changes"] > 0
    cases = {row["case"]: row for row in report["rows"]}
    assert len(cases) == len(report["rows"]) >= 12
    assert all(row["ours"] > 0 and row["limit"] > 0 for row in report["rows"])
    runs = [row for case, row in cases.items() if case.startswith("evicting a run")]
    assert [row["ratio"] for row in runs] == [1.0] * len(runs), "no token is handed over twice"
    beside = [row for case, row in cases.items() if "vLLM" in case]
    assert [row["limit_name"] for row in beside] == [
        "vLLM's publisher as measured on another machine"
    ] * 2
    assert [row["limit"] for row in beside] == [31_500, 21_100]


VLLM = """
import threading
from queue import Queue

import msgspec
import zmq
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None

class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored]

class ZmqEventPublisher:
    def __init__(self, rank, endpoint, hwm):
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.socket.set_hwm(hwm)
        self.socket.bind(endpoint)
        self.queue = Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def publish(self, batch):
        self.queue.put(batch)

    def run(self):
        number = 0
        while True:
            payload = msgspec.msgpack.encode(self.queue.get())
            self.socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
            number += 1
"""


def stand_in(folder: Path, source: str) -> str:
    """A Python in which a module in the place of vLLM's can be imported, but nothing else of it
    (vLLM itself needs torch)."""
    package = folder / "vllm" / "distributed"
    package.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("import torch_is_missing_here")
    (package / "kv_events.py").write_text(source)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return os.fspath(script)


@pytest.mark.parametrize("events", [1, 5])
async def test_vllms_publisher_is_measured_in_a_process_of_the_python_that_has_it(tmp_path, events):
    python, load = stand_in(tmp_path, VLLM), flush.Load(2, 16, events, 500)
    ours, bare, peer = await flush.beside_vllm(python, load, os.fspath(tmp_path), rounds=2)
    assert min(ours, bare, peer) > 0
    row = flush.vllm_row("case", ours, peer, 1.0)
    assert (row.limit, row.limit_name) == (round(peer, 4), "vLLM's publisher in this run")


async def test_a_python_without_vllm_is_an_error(tmp_path):
    python = stand_in(tmp_path, "raise ImportError('another vLLM')")
    with pytest.raises(ConfigError, match="cannot run vLLM's publisher"):
        await flush.publish_as_vllm(python, flush.Load(1, 16, 1, 10), os.fspath(tmp_path))
