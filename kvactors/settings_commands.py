"""The commands about settings: `config check`, `config show`, `config schema`, and `size`."""

from __future__ import annotations

import os
from pathlib import Path

from cyclopts import App
from rich.console import Console

from kvactors.config import read_toml
from kvactors.errors import ConfigError
from kvactors.scenario.output import (
    Output,
    check_distinct,
    print_fields,
    print_rows,
    to_stdout,
    write_json,
)
from kvactors.scenario.shipped import find_toml
from kvactors.settings_docs import json_schema
from kvactors.settings_report import as_toml, check_file, effective, kind_of
from kvactors.size_report import CacheDtype, SizeReport, size_report
from kvactors.sizes import human

config = App(name="config", help="Check, show and describe the settings of a cache.")


@config.command(name="check")
def config_check(*files: Path, json: Output | None = None) -> int:
    """Check files of settings, scenarios or replays, with the environment variables that a cache
    reads. Every fault is printed, with the allowed range or the choices. The exit status is 1 if
    there is one.

    Parameters
    ----------
    files
        TOML files, or names of packaged scenarios and replay settings.
    json
        Where to write what was found.
    """
    if not files:
        raise ConfigError("config check needs a file")
    check_distinct(files, json=json)
    found = [check_file(find_toml(path), os.environ) for path in files]
    console = Console(stderr=str(json) == "-", highlight=False, soft_wrap=True)
    for one in found:
        state = "[red]invalid[/red]" if one.faults else "[green]ok[/green]"
        console.print(f"[bold]{_plain(one.file)}[/bold]: {one.kind}, {state}")
        for text in one.faults:
            console.print(f"  {_plain(text)}")
        for text in one.notes:
            console.print(f"  {_plain(text)}", style="dim")
    if json is not None:
        write_json(found, json)
    return 1 if any(one.faults for one in found) else 0


@config.command(name="show")
def config_show(file: Path | None = None, *, json: Output | None = None) -> int:
    """Print the effective settings as TOML: defaults, a file's values and those of environment
    variables, each with its origin.

    Parameters
    ----------
    file
        A TOML file of settings, none for the defaults.
    json
        Where to write the settings with their origins, in place of the TOML.
    """
    check_distinct((file,), json=json)
    data = {} if file is None else read_toml(file)
    if kind_of(data)[0] != "settings":
        raise ConfigError(f"{file} is a {kind_of(data)[0]}, not the settings of a cache alone")
    found = effective(data, os.environ)
    if json is not None:
        write_json(found, json)
    else:
        print(as_toml(found), end="")
    return 0


@config.command(name="schema")
def config_schema() -> int:
    """Print the JSON schema of a file of settings, for editors and other programs."""
    write_json(json_schema(), "-")
    return 0


def size(
    source: Path,
    /,
    *,
    block_size: int | None = None,
    dtype: CacheDtype | None = None,
    tensor_parallel: int | None = None,
    extra_layers: int | None = None,
    device: str | None = None,
    host: str | None = None,
    disk: str | None = None,
    disk_rate: str | None = None,
    json: Output | None = None,
) -> int:
    """Print the bytes of a block and a token in each tier, and the settings of the tiers that fit
    memory and a disk of given sizes. All sizes are those of one tensor-parallel rank.

    Parameters
    ----------
    source
        A model's config.json as on HuggingFace, the folder that has it, or a TOML file of settings.
    block_size
        Tokens a block. By default 64, or that of the settings.
    dtype
        Of the cache of a model. By default the model's. uint8 for fp8.
    tensor_parallel
        Ranks of a model. By default 1.
    extra_layers
        MTP or draft layers of a model that have a cache.
    device
        GPU memory for blocks, such as "20 GiB".
    host
        Host memory for blocks.
    disk
        Space on a disk for blocks.
    disk_rate
        Bytes that the disk moves in a second, for the number of transit slots. By default "4 GiB".
    json
        Where to write the report.
    """
    check_distinct((source,), json=json)
    report = size_report(
        source,
        block_size=block_size,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        extra_layers=extra_layers,
        device=device,
        host=host,
        disk=disk,
        disk_rate=disk_rate,
    )
    print_size(report, Console(stderr=to_stdout(json)))
    if json is not None:
        write_json(report, json)
    return 0


def print_size(report: SizeReport, console: Console) -> None:
    """Print the report of `size`."""
    ranks = f", each of {report.ranks} ranks" if report.ranks > 1 else ""
    print_fields(
        f"{report.model or report.source}: {report.kind}{ranks}",
        [
            ("tokens a block", f"{report.block_size}"),
            ("bytes of a token", f"{report.token_bytes:,.0f}"),
            ("bytes of a block, device", f"{report.device_bytes:,.0f}"),
            ("bytes of a block, host slot", f"{report.host_bytes:,}"),
            ("bytes of a block, file store", f"{report.storage_bytes:,}"),
            ("blocks in 1 GiB", f"{report.blocks_per_gib:,}"),
            ("tokens in 1 GiB", f"{report.tokens_per_gib:,}"),
        ],
        console,
    )
    if report.tiers:
        rows = [
            ((one.tier, f"{one.blocks:,}", f"{one.tokens:,}", human(one.bytes)), None)
            for one in report.tiers
        ]
        print_rows(
            "tiers", ("tier", "blocks", "tokens", "bytes"), rows, console, numbers=range(1, 4)
        )
    for note in report.notes:
        console.print(f"note: {_plain(note)}", highlight=False)
    if report.tiers and report.settings:
        console.print()
        console.print(report.settings, end="", highlight=False, markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """A text without markup."""
    return text.replace("[", "\\[")
