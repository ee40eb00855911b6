"""How keys and values lie in memory. Page is the unit of the cache, slot is one token's place in it.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from attrs import Attribute, field, frozen
from attrs.validators import ge

from intarsia.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([KMGTIB]*)")


def parse_bytes(text: str) -> int:
    """Read `2GiB`, `512 MiB`, `1.5GB` or a plain number of bytes, as exactly as it is written.

    Raises:
        ValueError: it is none of these, or of 2**63 bytes or more.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is not None and match[2] in _UNITS:
        size = int(Fraction(match[1]) * _UNITS[match[2]])
        if size < 1 << 63:
            return size
    raise ValueError(f"{text!r:.80} is not a size such as 2GiB or 512MiB")


def _size(_: object, attribute: Attribute[str], value: str) -> None:
    if value == "auto":
        return
    try:
        parse_bytes(value)
    except ValueError:
        raise ConfigError(
            f"cache.{attribute.name}: {value!r:.80} is not 'auto' or a size such as '2GiB'",
            field=f"cache.{attribute.name}",
        ) from None


def _given_size(_: object, attribute: Attribute[str], value: str) -> None:
    try:
        parse_bytes(value)
    except ValueError:
        raise ConfigError(
            f"cache.{attribute.name}: {value!r:.80} is not a size such as '4GiB' or '0'",
            field=f"cache.{attribute.name}",
        ) from None


@frozen(kw_only=True)
class CacheOptions:
    """Options that every cache allocator has; its own options class inherits them."""

    #: slots a page, in tokens
    page_size: int = field(default=16, validator=ge(1))
    #: bytes for keys and values, such as "2GiB"; auto is half of what is free beside the weights
    memory: str = field(default="auto", validator=_size)
    #: how entries are stored: auto is the engine's dtype; int8 takes about half of bfloat16, and rounds
    format: str = "auto"
    #: bytes of host memory for the pages of preempted sequences, such as "4GiB", page-locked on GPUs; 0 computes their
    #: tokens again instead
    swap: str = field(default="0", validator=_given_size)


@frozen(kw_only=True)
class CacheGroup:
    """Layers whose keys and values share page tables, having equal heads and visibility."""

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@frozen(kw_only=True)
class CacheLayout:
    """Where one token's key and value lie; allocator, attention backend, cache-write op and runner must all read it.

    Attributes:
        order: of the axes of a layer's key and of its value tensor, named by the legend: `PSKD` or `PKSD`.
        format: entry format, a torch dtype's name or a quantized format's.
        entry_bytes: bytes of one number.
        scale_bytes: bytes of the scale that the D numbers of a token's key, or value, of one head share; 0 where the
            format has none.
        page_size: slots a page.
    """

    order: str
    format: str
    entry_bytes: int
    page_size: int
    groups: tuple[CacheGroup, ...]
    scale_bytes: int = 0

    def layer_token_bytes(self, group: CacheGroup) -> int:
        """Bytes that one token takes in one layer of a group: 2 x kv heads x (head dim x entry bytes + scale)."""
        return 2 * group.num_kv_heads * (group.head_dim * self.entry_bytes + self.scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers of all groups, scales included."""
        return sum(len(group.layers) * self.layer_token_bytes(group) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes that one page takes over all layers."""
        return self.token_bytes * self.page_size


@frozen(kw_only=True)
class CacheStats:
    """The books of an allocator, in pages; `wasted_slots` are reserved and hold no token."""

    num_pages: int
    used: int
    free: int
    cached: int = 0
    shared: int = 0
    wasted_slots: int = 0


@frozen(kw_only=True)
class SwapStats:
    """The books of host memory.

    Attributes:
        num_pages, used, free, cached: pages of the group that uses most; cached ones belong to nobody, and spare a copy
            where what they hold is swapped out again.
        swapped: sequences that are swapped out now.
        outs, ins: sequences that were swapped out, and back in, so far.
        declined: how often computing again was cheaper.
        no_room: how often host memory was full.
    """

    num_pages: int
    used: int
    free: int
    cached: int
    swapped: int
    outs: int
    ins: int
    declined: int
    no_room: int


@frozen(kw_only=True)
class SwapPrices:
    """What copying and computing take, in bytes a second and seconds a token.

    An engine measures both as it runs. The defaults hold until it has: they are assumed, not measured.
    """

    bytes_per_s: float = 4e9
    token_s: float = 1e-4

    def pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether to copy bytes, out and in again, takes less than to compute tokens again: b / B < t x s.

        Args:
            num_bytes: b, both ways together, at B = `bytes_per_s`.
            num_tokens: t, that would be computed again, at s = `token_s` each.
        """
        return num_bytes / self.bytes_per_s < num_tokens * self.token_s
