"""The paged cache's options."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import in_

from intarsia.types import CacheOptions


@frozen(kw_only=True)
class PagedOptions(CacheOptions):
    """Options of the paged cache, besides those of every cache."""

    #: keep full pages after their sequence is gone, and let equal prefixes share them
    prefix: bool = True
    #: swap a preempted sequence out when that is cheaper than to compute its tokens again, or always
    swap_when: Literal["cheaper", "always"] = field(default="cheaper", validator=in_(("cheaper", "always")))
