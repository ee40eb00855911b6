"""Options of this plugin's parts."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import deep_iterable, ge, min_len

from intarsia.errors import ConfigError
from intarsia.types import AUTO, CacheOptions, parse_bytes


def _size(_: object, attribute: Attribute[Any], value: str) -> None:
    try:
        parse_bytes(value)
    except ValueError:
        raise ConfigError(
            f"cache.{attribute.name}: {value!r:.80} is not a size such as '1GiB' or '0'",
            field=f"cache.{attribute.name}",
        ) from None


@frozen(kw_only=True)
class VmmOptions(CacheOptions):
    """Options of the cache `vmm`, besides those of every cache."""

    #: sequences that hold memory at once; each reserves addresses, which cost nothing, for max_model_len tokens
    max_sequences: int = field(default=256, validator=ge(1))
    #: bytes that stay mapped for the next sequences while nothing uses them; what is beyond goes back to the device
    keep: str = field(default="1GiB", validator=_size)


@frozen(kw_only=True)
class GraphOptions:
    """Options of the runner `cuda_graph`."""

    #: the runner that is captured: a key, or auto for the best that is no wrapper
    inner: str = AUTO
    #: numbers of decoding rows that are captured; a step takes the next larger one, and its rows are padded to it
    buckets: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64), validator=[min_len(1), deep_iterable(ge(1))]
    )
    #: lengths of rows, in tokens, that are captured besides max_model_len: shorter rows take less work
    lengths: tuple[int, ...] = field(default=(4096, 16384), validator=deep_iterable(ge(1)))
