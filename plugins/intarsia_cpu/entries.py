"""What native code is told of a cache's entries: `src/entries.h`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from intarsia.protocols import LayerCache

#: Cache formats, by name, as `entries::Entry` numbers them.
ENTRIES: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}


def entry_of(stored: torch.Tensor) -> int:
    """Return the number of the format that keys or values are stored in."""
    return ENTRIES[str(stored.dtype).removeprefix("torch.")]


@frozen
class Scales:
    """Where the scales of a layer's entries lie.

    Attributes:
        keys: address of those of the keys; None where the format has none.
        values: of those of the values.
        strides: of both, a number an axis of the layout's order but the last; zeros where there are none.
    """

    keys: int | None
    values: int | None
    strides: tuple[int, ...]

    @classmethod
    def of(cls, cache: LayerCache) -> Scales:
        """Read a layer's."""
        if cache.keys.dtype != torch.int8:
            return cls(None, None, (0, 0, 0))
        keys, values = cache.key_scales, cache.value_scales
        assert keys is not None and values is not None and keys.stride() == values.stride()
        assert keys.dtype == values.dtype == torch.float32
        return cls(keys.data_ptr(), values.data_ptr(), keys.stride())
