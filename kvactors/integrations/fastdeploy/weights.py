"""The version of the model's weights, as FastDeploy reads it for the names of stored blocks."""

from __future__ import annotations

import re
from pathlib import Path

from kvactors.errors import ConfigError

FILE = "version.yaml"
FIELD = re.compile(r"^version\s*:\s*(?P<quote>['\"]?)(?P<value>[^'\"#\s]+)(?P=quote)\s*(?:#.*)?$")
NO_VERSION = "default"
"""The namespace of weights without a version."""


def weights_version(model_path: str | Path) -> str:
    """The namespace of blocks that these weights have computed.

    The field `version` of `version.yaml` has the form RL-STEPxx-time-uuid. The first two parts
    name the weights.

    Args:
        model_path: the model's folder.

    Returns:
        For instance "RL-STEP03". `NO_VERSION` if there is no such file.

    Raises:
        ConfigError: the file cannot be read, or has no version.
    """
    path = Path(model_path) / FILE
    if not path.exists():
        return NO_VERSION
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for line in lines:
        if found := FIELD.match(line):
            return "-".join(found["value"].split("-")[:2])
    raise ConfigError(f"{path} has no line 'version: NAME', which names the weights")
