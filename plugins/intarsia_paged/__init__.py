"""The paged cache: pages with reference counts, shared prefixes, copy-on-write forks (Kwon et al. 2023)."""

from __future__ import annotations

from typing import Any

from intarsia.hookspecs import hookimpl
from intarsia.protocols import CacheContext
from intarsia.types import Fit, Provider
from intarsia_paged.options import PagedOptions


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """The paged allocator."""

    def build(context: CacheContext) -> Any:
        from intarsia_paged.allocator import PagedAllocator

        return PagedAllocator(context.options, context.layout, context.num_pages)

    return [
        Provider(
            key="paged",
            summary="pages taken as a sequence grows; equal prefixes share them",
            options=PagedOptions,
            fit=lambda _: Fit(50, "takes memory as sequences grow and shares prefixes"),
            build=build,
        )
    ]
