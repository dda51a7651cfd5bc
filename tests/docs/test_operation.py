"""The pages for operators name what the code says: reasons of health, names of metrics."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
from types import ModuleType

import pytest

from kvactors.data_plane.ranks.leader import RankState
from kvactors.device import arena
from kvactors.observe import health
from kvactors.storage import attempts
from kvactors.storage.file import layout, store
from tests.docs.pages import DOCS, HOW_TO
from tests.docs.test_dashboard import exposed_names

RULES = DOCS / "deploy" / "alerts.yml"
ENDS = re.compile(r":|, the last|, and ")
"""What follows a reason in its text: a value or the remedy."""


def reasons(module: ModuleType, *names: str) -> list[str]:
    """The texts that a module yields, or assigns to one of the names: of each what comes before
    values and the remedy."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        named = getattr(target, "attr", getattr(target, "id", ""))
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            found += [constant for part in node.value.elts if (constant := begins(part))]
        elif isinstance(node, ast.Assign) and named in names:
            found += [constant for constant in [begins(node.value)] if constant]
    return found


def begins(text: ast.AST) -> str:
    """The first constant part of a text that has several words, or any words."""
    constants = [getattr(one, "value", None) for one in ast.walk(text)]
    texts = [one for one in constants if isinstance(one, str)]
    parts = [part.strip(" .,:(") for one in texts for part in ENDS.split(one)]
    words = [part for part in parts if re.search("[a-z]{3}", part)]
    return max(words[:2], key=lambda part: " " in part, default="")


def test_every_reason_of_health_is_on_the_page_for_the_night():
    page = " ".join((HOW_TO / "at_3_am.md").read_text("utf-8").split())
    found = (
        reasons(health) + reasons(attempts, "why") + [one for one, _ in attempts.REMEDIES.values()]
    )
    found += (
        reasons(store, "concern", "_loss") + reasons(layout, "trouble") + reasons(arena, "trouble")
    )
    found += [one.value for one in RankState if one is not RankState.HEALTHY]
    assert len(found) > 20
    assert [one for one in found if one not in page] == []


def test_the_alerts_use_metrics_and_labels_of_the_collector():
    text = RULES.read_text("utf-8")
    exposed = exposed_names()
    names = set(re.findall(r"kvactors:\w+", text))
    assert len(names) >= 8
    assert names <= set(exposed)
    labels = {"instance", "job"}.union(*(exposed[name] for name in names))
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert set(re.findall(r"(\w+)=~?\"", text)) <= labels
    assert set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", text)))) <= labels


@pytest.mark.ci
def test_promtool_accepts_the_alerts():
    promtool = shutil.which("promtool")
    assert promtool, "install Debian's package prometheus"
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
