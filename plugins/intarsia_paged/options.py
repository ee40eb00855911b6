"""The paged cache's options."""

from __future__ import annotations

from attrs import frozen

from intarsia.types import CacheOptions


@frozen(kw_only=True)
class PagedOptions(CacheOptions):
    """Options of the paged cache, besides those of every cache."""

    #: keep full pages after their sequence is gone, and let equal prefixes share them
    prefix: bool = True
