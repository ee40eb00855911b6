"""Caches for suites: the books of allocators that come with Intarsia, made without a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from attrs import field, frozen

from intarsia.defaults.contiguous import ContiguousAllocator
from intarsia.plugins import Registry
from intarsia.protocols import CacheAllocator, CacheContext
from intarsia.testing.claims import settle
from intarsia.testing.memory import simulated_layout
from intarsia.types import (
    AttentionSpec,
    CacheLayout,
    DecoderSpec,
    EngineOptions,
    LayerSpec,
    MlpSpec,
    NormSpec,
    PluginsOptions,
    Provider,
)

__all__ = ["SimulatedCache", "allocator_of", "tiny_spec"]


def tiny_spec(num_layers: int = 1) -> DecoderSpec:
    """Return a model that nothing runs: parts are built from it."""
    layer = LayerSpec(AttentionSpec(1, 1, 4, 1.0, None), MlpSpec(8, "silu"))
    return DecoderSpec("llama", 64, 4, 512, NormSpec(), True, (layer,) * num_layers)


def allocator_of(
    provider: Provider,
    options: Mapping[str, Any],
    layout: CacheLayout,
    *,
    num_pages: int,
    num_host_pages: int = 0,
    max_len: int = 64,
) -> CacheAllocator:
    """Return an allocator's books, built as a composition would build them.

    Args:
        provider: who offers it.
        options: its own, as a config has them.
        layout: how the cache lies.
        num_pages: of the cache.
        num_host_pages: of the memory for swapped-out sequences.
        max_len: tokens of the longest sequence.
    """
    always = {"page_size": layout.page_size, "swap_when": "always"}
    context = CacheContext(
        options=settle(provider, "cache", always, dict(options)),
        engine=EngineOptions(max_model_len=max_len, device="cpu", dtype="float32", threads=1),
        spec=tiny_spec(len(layout.groups)),
        num_ids=64,
        layout=layout,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
    )
    built: CacheAllocator = provider.build(context)
    return built


@cache
def _paged() -> Provider:
    return Registry.discover(PluginsOptions(allow=("paged",))).find("cache", "paged").provider


@frozen(kw_only=True)
class SimulatedCache:
    """What a simulated run keeps its tokens in.

    Attributes:
        paged: pages as a sequence grows; else a region for the longest sequence.
        prefix: of a paged one, whether equal prefixes share pages.
        windows: of its groups of layers, see `simulated_layout`.
        num_pages: in all.
        num_host_pages: of the memory for sequences that are swapped out.
        max_len: tokens of the longest sequence.
    """

    paged: bool = True
    prefix: bool = True
    page_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    num_pages: int = 64
    num_host_pages: int = 0
    max_len: int = 24
    layout: CacheLayout = field(init=False)

    @layout.default
    def _lay_out(self) -> CacheLayout:
        return simulated_layout(self.page_size, self.windows)

    def build(self) -> CacheAllocator:
        """Return the books of an empty one."""
        if self.paged:
            return allocator_of(
                _paged(),
                {"prefix": self.prefix},
                self.layout,
                num_pages=self.num_pages,
                num_host_pages=self.num_host_pages,
                max_len=self.max_len,
            )
        region = -(-self.max_len // self.page_size)
        return ContiguousAllocator(
            page_size=self.page_size,
            num_groups=len(self.windows),
            region_pages=region,
            num_regions=max(1, self.num_pages // region),
        )
