"""How GGUF stores the numbers of a tensor: groups of a fixed number of elements in a fixed number of bytes."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from intarsia.errors import CheckpointError

#: Types that are plain numbers, little-endian.
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@frozen
class TensorFormat:
    """One tensor type.

    Attributes:
        type: its number in the file.
        name: `F32`, `Q4_1`, ...
        group: elements that are quantized together; rows are whole groups.
        group_bytes: bytes of one group.
    """

    type: int
    name: str
    group: int
    group_bytes: int

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of this many elements, a whole number of groups."""
        return num_elements // self.group * self.group_bytes

    def dequantize(self, data: np.ndarray) -> np.ndarray:
        """Return the float32 values of whole groups, given as a flat uint8 array.

        Raises:
            CheckpointError: there is no way to dequantize this type.
        """
        plain = _PLAIN.get(self.name)
        if plain is not None:
            return data.view(plain).astype(np.float32, copy=False)
        try:
            # One row: `gguf` works on groups of 16 rows one after another, and our blocks are small already.
            # Hostile scales overflow to inf, which is their meaning and no fault of the arithmetic.
            with np.errstate(all="ignore"):
                values: np.ndarray = gguf_dequantize(data.reshape(1, -1), GGMLQuantizationType(self.type))
        except NotImplementedError:
            raise CheckpointError(f"{self.name}: this version of the gguf package cannot dequantize it") from None
        return values.reshape(-1)

    @property
    def is_readable(self) -> bool:
        """Whether `dequantize` can read it: tried on one group."""
        try:
            self.dequantize(np.zeros(self.group_bytes, dtype=np.uint8))
        except CheckpointError:
            return False
        return True


#: Type number in the file -> format.
FORMATS: dict[int, TensorFormat] = {
    int(kind): TensorFormat(int(kind), kind.name, group, group_bytes)
    for kind, (group, group_bytes) in GGML_QUANT_SIZES.items()
}
