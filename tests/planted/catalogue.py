"""Every planted bug: `BUGS` of each file `bugs_*.py` beside this one. A new area gets a file of its
own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mutation import Mutation

FILES = sorted(file.stem for file in Path(__file__).parent.glob("bugs_*.py"))

MUTATIONS: tuple[Mutation, ...] = tuple(bug for name in FILES for bug in import_module(name).BUGS)
