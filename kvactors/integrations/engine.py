"""Shared by the adapters of several engines: log lines, settings of a file store, and the identity
of a model by its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvactors.actor.log import described, get_logger
from kvactors.errors import ConfigError
from kvactors.settings.check import convert
from kvactors.tier_cache import TierStorage

log = get_logger(component="integrations")


def entry_points(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package whose classes an engine loads by name. `modules`: those of the
    package that have each class. They import the engine, so they are imported when it asks."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find


def log_to(theirs: logging.Logger) -> None:
    """Write kvactors' log lines to the handlers of an engine's logger, unless the application has a
    handler that they reach."""
    ours = logging.getLogger("kvactors")
    reached = [*ours.handlers, *(logging.root.handlers if ours.propagate else ())]
    if all(isinstance(handler, logging.NullHandler) for handler in reached):
        for handler in theirs.handlers:
            ours.addHandler(handler)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.getEffectiveLevel())


# -- settings of a store

STORE_FIELDS = set(TierStorage.__struct_fields__)


class FileStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of a file store, of an engine that has them beside its own."""

    directory: str
    namespace: str = "default"
    free_space_floor: int | str = "64MB"
    durability: Literal["written", "synced"] = "written"
    io_depth: int = 16
    timeout_s: float = 10.0

    def storage(self, **more: Any) -> TierStorage:
        """The settings of the store, checked. `more`: in place of keys."""
        if not self.directory:
            raise ConfigError("directory is empty")
        fields = msgspec.structs.asdict(self) | more
        given = {name: value for name, value in fields.items() if name in STORE_FIELDS}
        return convert(given | {"backend": "file"}, TierStorage)


def check_ranks(storage: TierStorage, whose: str) -> None:
    """Refuse ranks in the settings: they are the engine's."""
    if (storage.rank, storage.ranks) != (0, 1):
        raise ConfigError(f"storage.rank and storage.ranks are those of {whose}")


# -- identity of a model
#
# Engines name a model by its path or by a name of a hub, which stay the same when the weights
# change. The digest is part of the model's name in a store. It must be the same for copies of a
# model on several machines, so it has no paths and no times: names and sizes of the files, the
# whole of small ones, and samples of the weights.

CONFIGURATION = ("config.json", "params.json", "*quant*.json", "*.py")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES, SAMPLE_BYTES, SAMPLE_EVERY_BYTES = 64, 4096, 16 << 20
"""Samples of a file of weights: at least so many, one in so many bytes, the first and last bytes
among them. The ends alone are not enough: weights that were merged with an adapter differ in some
layers only."""
DIGEST_CHARACTERS = 16


def model_digest(
    model: str,
    settings: Mapping[str, Any],
    *,
    revision: str | None = None,
    cache: str | None = None,
) -> str:
    """Identifies the files of a model, and the settings that change its keys and values.

    Args:
        model: a folder, a file, or a name of the Hugging Face hub.
        settings: of the engine, such as overrides of the configuration. Values that are not JSON
            count by their qualified names.
    """
    digest = sha256(json.dumps(dict(settings), sort_keys=True, default=_name_of).encode())
    error = "not found"
    try:
        files = _files(model, revision, cache)
        digest.update(b"".join(map(_digest_of, files)))
    except OSError as caught:
        files, error = [], described(caught)
    if not any(file.suffix in WEIGHTS for file in files):
        digest.update(str(revision).encode())
        log.warning(
            "weights of a model cannot be read: others under its name need another namespace",
            model=model,
            revision=revision,
            error=error,
        )
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def _files(model: str, revision: str | None, cache: str | None) -> list[Path]:
    """The files that decide a model's keys and values, by name. Empty if there are none here."""
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = _snapshot(model, revision, cache)
        if found is None:
            return []
        path = found
    patterns = (*CONFIGURATION, *(f"*{suffix}" for suffix in WEIGHTS))
    return sorted({file for each in patterns for file in path.glob(each) if file.is_file()})


def _snapshot(model: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of a model of the hub, as it was downloaded. None if there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except ValueError:  # no name of a model of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def _digest_of(file: Path) -> bytes:
    """Identifies name, size and content of a small file, or samples at equal distances."""
    size = file.stat().st_size
    digest = sha256(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as opened:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(opened.read())
        else:
            samples = max(SAMPLES, size // SAMPLE_EVERY_BYTES + 2)
            for number in range(samples):
                opened.seek(number * (size - SAMPLE_BYTES) // (samples - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))
