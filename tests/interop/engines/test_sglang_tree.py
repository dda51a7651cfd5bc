"""The benchmark `index` beside the Rust tree of SGLang's wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import index
from tests.interop.environments import Environments

pytestmark = pytest.mark.engines


def test_sglangs_tree_finds_the_same_tokens(environments: Environments, tmp_path: Path) -> None:
    """The benchmark compares the hits of every turn."""
    assert tmp_path.is_dir()  # the outer pytest gives it to the inner one
    python = environments.program("sglang_cpu")
    report = index.run(quick=True, sglang_python=python)
    beside = [row for row in report.rows if row.limit_name in (index.PEER, index.HASHED)]
    assert len(beside) == 12
    assert all(row.limit >= 0 < row.ours for row in beside)
