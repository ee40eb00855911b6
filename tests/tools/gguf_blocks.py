"""Random blocks of GGUF's quantized types, of which the gguf package makes some only.

Knows nothing of the code under test.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

#: Type -> the format in memory that it should become.
FORMATS = {
    Kind.Q8_0: "int8_g32",
    Kind.Q4_0: "int4_g32",
    Kind.Q4_1: "int4_g32_min",
    Kind.Q5_0: "int8_g32",
    Kind.Q5_1: "int8_g32_min",
    Kind.Q2_K: "int4_g16_min",
    Kind.Q3_K: "int4_g16",
    Kind.Q4_K: "int4_g32_min",
    Kind.Q5_K: "int8_g32_min",
    Kind.Q6_K: "int8_g16",
}
#: Type -> where the float16 scale of a block lies, and its minimum's, from llama.cpp's ggml-common.h.
_FLOATS = {
    Kind.Q8_0: (0, None),
    Kind.Q4_0: (0, None),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0, None),
    Kind.Q5_1: (0, 2),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108, None),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208, None),
}


def random_blocks(kind, shape, *, scale, minimum):
    """Return (rows, bytes of a row) of any bits, under this scale and minimum, both rounded to float16."""
    group, group_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = shape
    raw = np.random.default_rng(int(kind)).integers(0, 256, (rows, columns // group * group_bytes), dtype=np.uint8)
    set_float(kind, raw, row=slice(None), scale=scale, minimum=minimum)
    return raw


def set_float(kind, raw, *, row, scale=None, minimum=None):
    """Set the scales and minima of a row's blocks, in place."""
    blocks = raw.reshape(len(raw), -1, GGML_QUANT_SIZES[kind][1])
    for start, value in zip(_FLOATS[kind], (scale, minimum), strict=True):
        if start is not None and value is not None:
            blocks[row, :, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def without_minima(kind, raw):
    """Return the same blocks with minima of 0."""
    raw = raw.copy()
    set_float(kind, raw, row=slice(None), minimum=0)
    return raw
