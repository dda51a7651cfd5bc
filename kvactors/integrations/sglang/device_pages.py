"""Pages of a device pool of SGLang: their bytes, their numbers, and what identifies them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvactors.errors import ConfigError

POOL = "MHATokenToKVPool"
"""The class of pools whose pages are rows of keys and of values in every layer."""
LAYOUT = "nhd"
"""SGLang's name of the layout with the heads of one token side by side."""


class DevicePages:
    """The pages of one device pool.

    Args:
        pool: SGLang's device pool.
        page_tokens: tokens of a page.

    Attributes:
        tensors: row p of each is the share of page p: keys of every layer, then values.
        num_layers: layers.
        page_tokens: tokens of a page.
        page_bytes: bytes of a page.

    Raises:
        ConfigError: the pool has pages of another form.
    """

    def __init__(self, pool: Any, page_tokens: int) -> None:
        self._pool = pool
        self._check()
        self.page_tokens = page_tokens
        self.num_layers = len(pool.k_buffer)
        self.tensors = [self._rows(buffer) for buffer in (*pool.k_buffer, *pool.v_buffer)]
        self._sizes = [one.stride(0) * one.element_size() for one in self.tensors]
        self.page_bytes = sum(self._sizes)

    def _check(self) -> None:
        kind = type(self._pool).__name__
        layout = getattr(self._pool, "kv_cache_layout", None)
        scaled = [
            name
            for name in ("k_scale_buffer", "native_k_scale_buffer")
            if getattr(self._pool, name, None) is not None
        ]
        if kind != POOL or layout != LAYOUT or scaled or not self._pool.k_buffer:
            form = f"{kind}, layout {layout!r}{', with scales' if scaled else ''}"
            raise ConfigError(
                f"KVActorsLinker moves pages of {POOL} with the layout {LAYOUT!r}, and this "
                f"model's device pool is {form}: use KVActorsHiCache"
            )

    def _rows(self, buffer: Any) -> Any:
        """A layer's keys or values with one row for each whole page."""
        pages = buffer.shape[0] // self.page_tokens
        return buffer[: pages * self.page_tokens].view(pages, -1)

    def numbers(self, indices: Any, count: int) -> list[int]:
        """The pages that indices of tokens stand for.

        Args:
            indices: of the tokens of all pages, a tensor.
            count: pages.

        Raises:
            ValueError: the indices are not those of so many whole pages.
        """
        if indices is None or len(indices) != count * self.page_tokens:
            found = None if indices is None else len(indices)
            raise ValueError(f"{found} indices of {count} pages with {self.page_tokens} each")
        tokens = np.array(indices.tolist(), np.int64).reshape(count, self.page_tokens)
        starts = tokens[:, 0]
        whole = (tokens == starts[:, None] + np.arange(self.page_tokens)).all(axis=1)
        whole &= starts % self.page_tokens == 0
        if not whole.all():
            wrong = tokens[int(np.argmin(whole))]
            raise ValueError(
                f"indices {wrong[0]} to {wrong[-1]} are not a page of {self.page_tokens}"
            )
        return [int(page) for page in starts // self.page_tokens]

    @property
    def facts(self) -> dict[str, str | int | None]:
        """The facts that two pools must share for their pages to be interchangeable."""
        pool = self._pool
        return {
            "name": "kv",
            "kind": type(pool).__name__,
            "layout": str(pool.kv_cache_layout),
            "dtype": str(pool.dtype),
            "store_dtype": str(pool.store_dtype),
            "page_tokens": self.page_tokens,
            "regions": ",".join(map(str, self._sizes)),
            "start_layer": int(pool.start_layer or 0),
            "head_num": int(pool.head_num),
            "head_dim": int(pool.head_dim),
            "v_head_dim": int(pool.v_head_dim),
        }
