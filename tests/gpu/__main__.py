"""`python -m tests.gpu`: check and measure everything that needs a GPU, and write
docs/benchmarks_gpu.md.

Exit status 2 without a GPU, 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvactors.data_plane.cuda.driver import LIBRARY, CudaContext, CudaDriver
from kvactors.errors import DeviceError
from tests.benchmarks.copy_gpu import gpu_rows
from tests.benchmarks.frame import ROOT, Report, Row, machine, table, versions
from tests.gpu.checks import model_folder, run_checks

PAGE = ROOT / "docs" / "benchmarks_gpu.md"
FRAMEWORKS = ("paddlepaddle-gpu", "paddlepaddle", "torch", "vllm")
VLLM_LIMIT = 900.0
"""Seconds that vLLM may take. Only a hang takes as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, write. Returns the exit status."""
    options = parsed(arguments)
    try:
        driver = CudaDriver(options.driver)
        count = driver.read_int("cuDeviceGetCount")
    except DeviceError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    if not count:
        print("no GPU: the driver lists none", file=sys.stderr)
        return 2
    began = time.monotonic()
    found = asyncio.run(run_checks(driver, options.only))
    for name, (good, text) in found.items():
        print(f"{'right' if good else 'WRONG'}: {name}: {text}", flush=True)
    rows = []
    if not options.no_bench:
        rows = asyncio.run(gpu_rows(quick=options.quick, driver=driver, total=options.bytes))
    vllm = in_vllm(options.vllm_python) if options.vllm_python else None
    page = page_of(gpu(driver), found, rows, vllm, time.monotonic() - began, quick=options.quick)
    options.page.write_text(page)
    print(f"{options.page} written")
    good = all(one for one, _ in found.values()) and (vllm is None or bool(vllm.get("same")))
    return 0 if good else 1


def gpu(driver: CudaDriver) -> dict[str, str]:
    """The GPU, its driver and the frameworks."""
    context = CudaContext(0, driver)
    try:
        with context.current():
            name = context.name
            counts = {
                attribute: driver.read_int("cuDeviceGetAttribute", attribute, 0)
                for attribute in (16, 75, 76)
            }
    finally:
        context.close()
    frameworks = versions(FRAMEWORKS)
    return {
        "GPU": f"{name}, {counts[16]} multiprocessors, compute capability {counts[75]}.{counts[76]}",
        "CUDA driver": f"{driver.version // 1000}.{driver.version % 1000 // 10}",
        "frameworks": ", ".join(f"{one} {v}" for one, v in frameworks.items()) or "none",
        **machine(),
    }


def in_vllm(python: str) -> dict[str, Any]:
    """Prompts in vLLM with kvactors' tiers, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder) / "model")
        try:
            done = subprocess.run(
                [python, str(Path(__file__).with_name("vllm_child.py")), str(model)],
                capture_output=True,
                text=True,
                timeout=VLLM_LIMIT,
                check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def page_of(
    machine: Mapping[str, str],
    checks: Mapping[str, tuple[bool, str]],
    rows: Sequence[Row],
    vllm: Mapping[str, Any] | None,
    seconds: float,
    *,
    quick: bool,
) -> str:
    """The page's text."""
    lines = ["# GPU benchmarks", ""]
    if machine["GPU"].startswith("Stand-in"):
        lines += ["**This run is on the stand-in driver, not on a GPU. It proves nothing.**", ""]
    lines += [
        f"Written by `python -m tests.gpu` on {time.strftime('%Y-%m-%d')} in {seconds:.0f} s.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in machine.items()),
        "",
        "## Checks",
        "",
        "| check | result | |",
        "|---|---|---|",
        *(
            f"| {name} | {'right' if good else '**wrong**'} | {text.replace('|', '/')} |"
            for name, (good, text) in checks.items()
        ),
    ]
    if vllm is None:
        lines.append("| vLLM with kvactors | not run | no `--vllm-python` |")
    elif "error" in vllm:
        lines.append(f"| vLLM with kvactors | **wrong** | {str(vllm['error']).replace('|', '/')} |")
    else:
        lines.append(
            f"| vLLM with kvactors | {'right' if vllm['same'] else '**wrong**'} | "
            f"{vllm['cached']} tokens from the tiers, {vllm['computed_s']:.2f} s computed, "
            f"{vllm['loaded_s']:.2f} s loaded |"
        )
    text = "\n".join(lines) + "\n"
    if rows:
        text += "\n## Copies\n" + table(Report(list(rows), {"quick": quick})).rstrip() + "\n"
    return text


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--driver", default=LIBRARY, help="the driver's library")
    parser.add_argument("--quick", action="store_true", help="short benchmarks")
    parser.add_argument("--no-bench", action="store_true", help="no benchmarks")
    parser.add_argument("--bytes", type=int, help="of a batch in the benchmarks")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="these checks alone")
    parser.add_argument("--vllm-python", default="", help="an interpreter that has vLLM")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
