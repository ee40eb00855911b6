"""A paged cache whose cached prefixes live for a set time after their last use."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_ttl_prefix.options import TtlPrefixOptions


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """The cache `ttl_prefix`."""
    return [
        Provider(
            key="ttl_prefix",
            summary="pages taken as a sequence grows; prefixes that nobody uses are forgotten after ttl_s",
            options=TtlPrefixOptions,
            build=lazy("intarsia_ttl_prefix.allocator:build"),
        )
    ]
