"""Types of settings with their ranges. `ranges` enforces them, the JSON schema and the reference of
the settings show them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
"""At least one: blocks, ranks, heads."""

Number = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A count that may be zero, or a number that counts from zero."""

Several = Annotated[int, Meta(ge=2, le=1 << 31)]
BlockTokens = Annotated[int, Meta(ge=1, le=1 << 14)]
"""Tokens a block. Engines use up to about 2,000, and the index prepares memory by blocks."""

SmallCount = Annotated[int, Meta(ge=1, le=1 << 20)]
SmallNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Dimension = Annotated[int, Meta(ge=1, le=1 << 16)]
LayerCount = Annotated[int, Meta(ge=0, le=1 << 16)]
RankCount = Annotated[int, Meta(ge=1, le=1 << 10)]
DeviceNumber = Annotated[int, Meta(ge=0, le=1023)]
Threads = Annotated[int, Meta(ge=1, le=256)]
CopyThreads = Annotated[int, Meta(ge=1, le=64)]  # of one `CopyWorker`
Depth = Annotated[int, Meta(ge=1, le=1024)]
ObjectCount = Annotated[int, Meta(ge=0, le=1 << 40)]
MOST_BYTES = 1 << 50
"""1 PiB."""

ByteCount = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A time limit or an interval, which may not be zero."""

SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Multiple = Annotated[float, Meta(ge=1, le=1 << 10)]

SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[iI]?[bB]?\s*$"

BlockSize = Count | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Blocks, or bytes as a text with a unit such as "8 GiB" (see `sizes`)."""

ByteSize = ByteCount | Annotated[str, Meta(pattern=SIZE_PATTERN)]
"""Bytes, or a text such as "8 GiB" (see `sizes`)."""

WritePolicy = Literal["none", "write_through", "write_through_selective", "write_back"]
