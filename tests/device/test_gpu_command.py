"""`python -m tests.gpu` on the stand-in driver, and without any."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.data_plane.cuda.engine import CudaCopyEngine, StreamWait
from kvactors.device.events import StreamEvent
from kvactors.lease import LeaseHandle
from tests.benchmarks import copy_gpu
from tests.benchmarks.copy_gpu import gpu_rows
from tests.docs.pages import HOW_TO, blocks_of
from tests.gpu import __main__ as command
from tests.gpu import checks
from tests.gpu.common import Wrong


def test_without_a_driver_or_a_gpu_it_ends_with_one_line(fake, capsys, tmp_path):
    page = tmp_path / "page.md"
    assert command.main(["--driver", str(tmp_path / "libcuda.so"), "--page", str(page)]) == 2
    fake.set("devices", 0)
    assert command.main(["--driver", fake.path, "--page", str(page)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["no GPU", "no GPU"]
    assert lines[1] == "no GPU: the driver lists none"
    assert not page.exists()


def test_the_shipped_page_names_no_run():
    text = command.PAGE.read_text()
    assert "No run on a GPU is on record." in text
    assert "|" not in text


def test_every_check_is_right_on_the_stand_in(fake, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in ("1 KiB", "64 KiB")}
    )
    page = tmp_path / "page.md"
    options = ["--driver", fake.path, "--page", str(page), "--no-bench"]
    assert command.main(options) == 0
    text = page.read_text()
    assert "**This run is on the stand-in driver, not on a GPU. It proves nothing.**" in text
    for name in checks.CHECKS:
        assert f"| {name} | right |" in text
    assert "| GPU | Stand-in, 132 multiprocessors, compute capability 9.0 |" in text
    assert "| CUDA driver | 13.0 |" in text
    assert "| vLLM with kvactors | not run |" in text
    printed = [line.split(":")[:2] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert printed == [["right", f" {name}"] for name in checks.CHECKS]
    [shown] = blocks_of(HOW_TO / "paddle_gpu.md", "text")
    assert [line.split(":")[:2] for line in shown.splitlines()[:-1]] == printed


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("every copy path, real bytes", (CudaDevice, "check")),
        ("cancelled copies", (CudaDevice, "check")),
        ("a cache with three tiers", (CudaDevice, "check")),
        ("sleep and wake", (CudaDevice, "check")),
        ("two ranks", (CudaDevice, "check")),
        ("copies without an event loop", (CudaDevice, "check")),
        ("an engine's stream waits for layers", (CudaCopyEngine, "_put")),
    ],
)
def test_a_wrong_byte_or_a_failed_copy_is_found(fake, name, broken, monkeypatch):
    def submit(lane, op) -> None:
        raise ValueError("planted")

    where, what = broken
    answer = submit if what == "_put" else (lambda *_: [0])
    monkeypatch.setattr(where, what, answer)
    monkeypatch.setattr(
        checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in ("1 KiB", "64 KiB")}
    )
    ((good, text),) = asyncio.run(checks.run_checks(CudaDriver(fake.path), [name])).values()
    assert not good
    assert text.startswith(("Wrong: ", "ExceptionGroup: "))


@pytest.mark.parametrize(
    ("name", "broken", "answer", "text"),
    [
        (
            "calls of a lease wait for an engine's stream",
            (StreamEvent, "query"),
            lambda _: True,
            "commit has not waited",
        ),
        (
            "an engine's stream waits for loads",
            (StreamWait, "add"),
            lambda wait, _: wait.done.done() or wait.done.set_result(None),
            "wait_ready: the stream has not waited",
        ),
        (
            "an engine's stream waits for loads",
            (CudaCopyEngine, "make_stream_wait"),
            lambda *_: True,
            "wait_layer: the stream has not waited",
        ),
        (
            "an engine's stream waits for loads",
            (LeaseHandle, "check_read"),
            lambda *_: None,
            "shared before the result",
        ),
    ],
)
def test_a_stream_that_is_not_waited_for_is_found(fake, name, broken, answer, text, monkeypatch):
    monkeypatch.setattr(*broken, answer)
    monkeypatch.setattr("tests.gpu.streams.HELD", 1.0)  # the stand-in copies in a thread
    ((good, found),) = asyncio.run(checks.run_checks(CudaDriver(fake.path), [name])).values()
    fake.forgive()  # the races that follow
    assert not good
    assert text in found


def test_a_failed_check_is_on_the_page_and_in_the_exit_status(fake, tmp_path, monkeypatch):
    async def bad(_: CudaDriver) -> str:
        raise Wrong("block 3 | has other bytes")

    monkeypatch.setattr(checks, "CHECKS", {"copies": bad})
    page = tmp_path / "page.md"
    assert command.main(["--driver", fake.path, "--page", str(page), "--no-bench"]) == 1
    assert "| copies | **wrong** | Wrong: block 3 / has other bytes |" in page.read_text()


def test_every_benchmark_row_runs_on_the_stand_in(fake, monkeypatch):
    small = {"pieces of 4 KiB": checks.LAYOUTS["1 KiB"]}
    monkeypatch.setattr(copy_gpu, "layouts", lambda **_: small)
    rows = asyncio.run(gpu_rows(quick=True, driver=CudaDriver(fake.path), total=40_000))
    cases = [row.case for row in rows]
    assert len(set(cases)) == len(cases) == 10
    assert any("both ways at once" in case for case in cases)
    assert all(row.ours > 0 for row in rows)
    fake.set("devices", 0)
    assert asyncio.run(gpu_rows(quick=True, driver=CudaDriver(fake.path))) == []


@pytest.mark.parametrize(
    ("script", "expected", "status"),
    [
        ('{"same": true, "cached": 4096, "computed_s": 2.0, "loaded_s": 0.5}', "right", 0),
        ('{"same": false, "cached": 0, "computed_s": 2.0, "loaded_s": 0.5}', "**wrong**", 1),
        ("", "**wrong**", 1),
    ],
)
def test_the_answer_of_vllm_is_on_the_page(fake, tmp_path, script, expected, status):
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho noise\necho '{script}'\n" if script else "#!/bin/sh\nexit 3\n"
    )
    python.chmod(0o755)
    page = tmp_path / "page.md"
    options = ["--driver", fake.path, "--page", str(page), "--no-bench", "--only", "copies"]
    assert command.main([*options, "--vllm-python", str(python)]) == status
    assert f"| vLLM with kvactors | {expected} |" in page.read_text()
