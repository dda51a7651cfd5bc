"""The version of the model's weights, as FastDeploy reads it for the names of stored blocks."""

from __future__ import annotations

import re
import time
from pathlib import Path

from kvactors.errors import ConfigError

FILE = "version.yaml"
FIELD = re.compile(r"^version\s*:\s*(?P<quote>['\"]?)(?P<value>[^'\"#\s]+)(?P=quote)\s*(?:#.*)?$")
NO_VERSION = "default"
"""The namespace of weights without a version."""

SETTLED_S = 2.0
"""Seconds after which a change of the file has another time than the change before it."""


class WeightsVersion:
    """Watches `version.yaml`.

    Args:
        model_path: the model's folder.
    """

    def __init__(self, model_path: str | Path) -> None:
        self._path = Path(model_path) / FILE
        self._seen: tuple[int, ...] | None = None  # the file whose version is known
        self._version = NO_VERSION

    def now(self) -> str:
        """The namespace of blocks that the present weights compute, for instance "RL-STEP03".

        The field `version` has the form RL-STEPxx-time-uuid. The first two parts name the weights.
        The file is read again when it has changed.

        Raises:
            ConfigError: the file cannot be read, or has no version.
        """
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if seen == self._seen:
                return self._version
            self._version = self._read()
        except FileNotFoundError:
            return NO_VERSION
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self._path}: {error}") from error
        self._seen = seen if time.time() - found.st_ctime > SETTLED_S else None
        return self._version

    def _read(self) -> str:
        for line in self._path.read_text("utf-8").splitlines():
            if found := FIELD.match(line):
                return "-".join(found["value"].split("-")[:2])
        raise ConfigError(f"{self._path} has no line 'version: NAME', which names the weights")
