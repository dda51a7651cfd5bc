"""Check for options without a use in an engine's configuration: one that would be ignored is an
error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvactors.applicable import STORAGE_USES
from kvactors.errors import ConfigError

if TYPE_CHECKING:
    from kvactors.integrations.fastdeploy.settings import ManagerSettings

OPENING = {"open_timeout_s", "close_timeout_s"}
SLOT_WAITS = {"on_full", "on_full_wait_s", "slot_timeout_s"}
SLOTS = {"numa_node", "copy_threads"}
"""Options of host slots."""
READS = {"staging_slots", "fetch_wait_s"}
"""Options of storage that blocks reach through host slots."""


def check_uses(settings: ManagerSettings) -> None:
    """Check options against the tiers that are configured.

    Raises:
        ConfigError: names an option that is given and has no use. One with its default value does
            not count as given.
    """
    stored = settings.storage.backend != "none"
    direct = settings.backend == "attention_store" and not settings.flush_only
    unused = set() if stored else set(READS)
    if not (stored or settings.host_blocks or settings.swap_gib):
        unused |= SLOTS
    used = {"backend", "write_policy", "rank", "ranks"}
    if stored:
        used |= STORAGE_USES[settings.backend] | OPENING | SLOT_WAITS
        used -= {"min_hits"}
    elif direct:
        used |= OPENING | {"timeout_s"}
    elif settings.config.flush.sinks:
        used |= OPENING
    options = settings.options
    for name in sorted(unused & _given(options)):
        raise ConfigError(f"options: {name} has no use {_where(settings)}: remove it")
    for name in sorted(_given(options.storage) - used):
        raise ConfigError(f"options: storage.{name} has no use {_where(settings)}: remove it")


def check_tensor_uses(settings: ManagerSettings, *, on_gpu: bool) -> None:
    """Check options against the tensors that the tiers copy.

    Args:
        settings: of the manager.
        on_gpu: whether the tensors are in the memory of a GPU.

    Raises:
        ConfigError: names an option that is given and has no use with these tensors.
    """
    if on_gpu and "copy_threads" in _given(settings.options):
        raise ConfigError(
            "options: copy_threads has no use with tensors of a GPU, whose copy engines move the "
            "bytes: remove it"
        )


def _given(table: msgspec.Struct) -> set[str]:
    """Options that differ from their defaults."""
    default = type(table)()
    return {
        name for name in table.__struct_fields__ if getattr(table, name) != getattr(default, name)
    }


def _where(settings: ManagerSettings) -> str:
    backend = settings.backend + (" as an index only" if settings.flush_only else "")
    host = settings.host_blocks or settings.swap_gib
    return f"with storage {backend} and {'a' if host else 'no'} host tier"
