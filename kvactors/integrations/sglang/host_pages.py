"""Pages of a host pool of SGLang: their sizes, their addresses, and what identifies their bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvactors.errors import ConfigError


class Region(NamedTuple):
    """Contiguous memory.

    Attributes:
        address: of its first byte.
        nbytes: its length.
    """

    address: int
    nbytes: int


class HostPages:
    """The pages of one host pool.

    Args:
        name: SGLang's name of the pool.
        pool: SGLang's host pool.

    Attributes:
        name: SGLang's name of the pool.
        page_tokens: indices of a page.
        page_bytes: bytes of a page.

    Raises:
        ConfigError: the pool does not give the addresses of its pages.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self._sizes = self._sizes_of_page()
        self.page_bytes = sum(self._sizes)

    def _sizes_of_page(self) -> tuple[int, ...]:
        import torch

        try:
            first = self._pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"SGLang's host pool {self.name!r} ({type(self._pool).__name__}, layout "
                f"{getattr(self._pool, 'layout', None)!r}) gives no addresses of its pages: {error}"
            ) from error
        sizes = () if not first else tuple(int(size) for size in first[1])
        if not sum(sizes):
            raise ConfigError(
                f"SGLang's host pool {self.name!r} ({type(self._pool).__name__}) keeps no bytes"
            )
        return sizes

    @property
    def facts(self) -> dict[str, str | int | None]:
        """The facts that two pools must share for their pages to be interchangeable."""
        pool = self._pool
        optional = ("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim")
        return {
            "name": self.name,
            "kind": type(pool).__name__,
            "layout": str(getattr(pool, "layout", None)),
            "format": getattr(pool, "storage_format_tag", None),
            "dtype": str(getattr(pool, "dtype", None)),
            "page_tokens": self.page_tokens,
            "regions": ",".join(str(size) for size in self._sizes),
            **{name: _number(getattr(pool, name, None)) for name in optional},
        }

    def is_of(self, pool: Any) -> bool:
        """Whether `pool` is the one described."""
        return pool is self._pool

    def regions(self, indices: Any, count: int) -> list[list[Region]]:
        """The memory of pages, in the order of an object's bytes.

        Args:
            indices: of the tokens of all pages, a tensor.
            count: pages.

        Raises:
            ValueError: there are not as many pages, or SGLang describes them otherwise than at the
                start.
        """
        if indices is None or len(indices) != count * self.page_tokens:
            found = None if indices is None else len(indices)
            raise ValueError(
                f"{found} indices of {count} pages with {self.page_tokens} each ({self.name})"
            )
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        each = len(self._sizes)
        if len(addresses) != count * each or tuple(sizes) != self._sizes * count:
            raise ValueError(f"pages of {self.name} are not those of the start")
        pairs = [Region(int(a), int(n)) for a, n in zip(addresses, sizes, strict=True)]
        return [pairs[i * each : (i + 1) * each] for i in range(count)]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
