"""The paged cache: pages with reference counts, shared prefixes, copy-on-write forks (Kwon et al. 2023)."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Fit, Provider, lazy
from intarsia_paged.options import PagedOptions


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """The paged allocator."""
    return [
        Provider(
            key="paged",
            summary="pages taken as a sequence grows; equal prefixes share them",
            options=PagedOptions,
            fit=lambda _: Fit(50, "takes memory as sequences grow and shares prefixes"),
            build=lazy("intarsia_paged.allocator:build"),
        )
    ]
