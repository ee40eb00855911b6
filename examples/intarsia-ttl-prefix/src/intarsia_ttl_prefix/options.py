"""The cache's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from intarsia.types import CacheOptions


@frozen(kw_only=True)
class TtlPrefixOptions(CacheOptions):
    """Options of the cache `ttl_prefix`, besides those of every cache."""

    #: seconds that a prefix is kept after its last user has left; 0 shares prefixes among running sequences alone
    ttl_s: float = field(default=300.0, validator=ge(0))
