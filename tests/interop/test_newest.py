"""Newer versions of the engines are warnings. Without any network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop import newest
from tests.interop.environments import InteropError


def refuse(*_: Any) -> str:
    raise InteropError("the reason")


def test_a_newer_version_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(newest, "newest", lambda python, package, *pre: "99" if pre else "0.5.6")
    monkeypatch.setattr(newest, "run", refuse)
    newest.main(tmp_path)
    shown = capsys.readouterr()
    assert "lmcache 0.5.6: is pinned" in shown.out
    assert "WARNING: lmcache 99: the reason" in shown.err
    monkeypatch.setattr(newest, "run", lambda *_: None)
    newest.main(tmp_path)
    assert "lmcache 99: is newer than the pinned one, and works" in capsys.readouterr().out


def test_without_an_index_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(newest, "newest", refuse)
    newest.main(tmp_path)
    assert "vllm: skipped: the reason" in capsys.readouterr().out
