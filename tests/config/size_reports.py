"""The report of `kvactors size`."""

import msgspec

from kvactors.settings_report import SizeReport, size


def size_report(source, **options):
    folder = source if source.is_dir() else source.parent
    assert size(source, json=folder / "report.json", **options) == 0
    return msgspec.json.decode((folder / "report.json").read_bytes(), type=SizeReport)
