"""Pages of SGLang's host pools, and the prefixes that several pools allow together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvactors.errors import ConfigError
from kvactors.integrations.page_store import PageRegion


class HostPages:
    """The pages of one host pool. `page_tokens`: indices of a page."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_tokens = int(pool.page_size)
        self._sizes = self._sizes_of_page()
        self.page_bytes = sum(self._sizes)

    def _sizes_of_page(self) -> tuple[int, ...]:
        import torch

        kind = type(self.pool).__name__
        try:
            first = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"SGLang's host pool {self.name!r} ({kind}, layout "
                f"{getattr(self.pool, 'layout', None)!r}) gives no addresses of its pages: {error}"
            ) from error
        sizes = () if not first else tuple(int(size) for size in first[1])
        if not sum(sizes):
            raise ConfigError(f"SGLang's host pool {self.name!r} ({kind}) keeps no bytes")
        return sizes

    @property
    def facts(self) -> dict[str, str | int | None]:
        """The facts that two pools must share for their pages to be interchangeable."""
        pool = self.pool
        optional = ("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim")
        return {
            "name": self.name,
            "kind": type(pool).__name__,
            "layout": str(getattr(pool, "layout", None)),
            "format": getattr(pool, "storage_format_tag", None),
            "dtype": str(getattr(pool, "dtype", None)),
            "page_tokens": self.page_tokens,
            "regions": ",".join(map(str, self._sizes)),
            **{name: _number(getattr(pool, name, None)) for name in optional},
        }

    def regions(self, indices: Any, count: int) -> list[list[PageRegion]]:
        found = None if indices is None else len(indices)
        if found != count * self.page_tokens:
            raise ValueError(
                f"{found} indices of {count} pages with {self.page_tokens} each ({self.name})"
            )
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self._sizes)
        if len(addresses) != count * each or tuple(sizes) != self._sizes * count:
            raise ValueError(f"pages of {self.name} are not those of the start")
        pairs = [PageRegion(int(a), int(n)) for a, n in zip(addresses, sizes, strict=True)]
        return [pairs[i * each : (i + 1) * each] for i in range(count)]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Prefixes(NamedTuple):
    """Prefixes that can be restored, in pages: the longest one, the longest one that each pool
    allows, and those that every pool allows, ascending."""

    longest: int
    of_pools: list[int]
    restorable: list[int]


def leading(has: Sequence[bool]) -> int:
    """Pages that are there before the first one that is not."""
    return next((i for i, found in enumerate(has) if not found), len(has))


def find_prefixes(kv_pages: int, pools: Sequence[tuple[Sequence[bool], int]]) -> Prefixes:
    """Find the prefixes that every pool allows. `kv_pages`: of the longest one that the pool of
    keys and values allows. `pools`: for each other one, whether it has each page, and how many last
    pages of a prefix it must have."""
    allowed = [_with_window(has, trailing) for has, trailing in pools]
    restorable = [one for one in range(1, kv_pages + 1) if all(one in found for found in allowed)]
    longest = [max(found, default=0) for found in allowed]
    return Prefixes(max(restorable, default=0), longest, restorable)


def _with_window(has: Sequence[bool], trailing: int) -> set[int]:
    """Prefixes whose last pages are there."""
    found, run = set(), 0
    for i, there in enumerate(has):
        run = run + 1 if there else 0
        if run >= min(trailing, i + 1):
            found.add(i + 1)
    return found
