"""Linear layers by our own kernels: weights packed into panels while they load, then any number of rows.

| weight format | activations become | result |
| --- | --- | --- |
| `dense` float32 | float32 | one chain of fused multiply-adds an output |
| `dense` bfloat16 | bfloat16 | as above, sums in fp32 |
| `int8` | int8, a scale a token and 64 columns | exact int32 sums a group, then the scales |
| `int8_g*`, `int4_g*` | int8, a scale a token and group, of 64 columns at most | as above, with the group's scale |
| `int8_a16`, `int8_g*_a16`, `int4_g*_a16` | as they come | fp32 sums a group or a row, then the scale |

Activations that stay floats are bfloat16 in bfloat16 engines on machines with dot products of them, else float32. Where
the machine lacks dot products of bfloat16 or of bytes, the numbers of the table are held as floats, or in 16 bits.
`intarsia.quantizing.integers` and `.rotated` describe the formats; an `input_scale` multiplies rows while they are made
ready, and rows for `_rotated` formats are rotated then.

A packed weight (format `cpu`) has `panels`, int32 words (panels, steps, 48): the words of 48 outputs lie side by side,
step by step along the columns. `scales`, `zeros` and `mins` lie as the header `src/activations.h` says. Packing moves
bits and computes nothing, so a packed weight can be unpacked.

Shape legend: T tokens, C in features, N out features, G groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.ops import linear as reference
from intarsia.protocols import Kernel
from intarsia.quantizing.integers import FORMATS as INTEGER_FORMATS
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.rotated import ROTATED, RotatedFormat
from intarsia.quantizing.sparse import SparseFormat
from intarsia.types import Invariance, Weight, WeightFormat, dense
from intarsia_cpu import build as kernels
from intarsia_cpu import sparse
from intarsia_cpu.memory import empty

#: Outputs a panel.
PANEL = 48
#: Columns that share an activation scale, at most.
GROUP = 64
#: Name of the packed format.
PACKED = "cpu"
FP32, BF16, INT8, INT4 = range(4)
#: `linear::Numbers`.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
#: Names of the weight formats that are read.
FORMATS = frozenset(
    {"dense", "sparse24", "sparse24_int8"}
    | {layout.name for layout in INTEGER_FORMATS}
    | {layout.name for layout in ROTATED}
)
#: The same in words.
FORMATS_READ = "dense, sparse24*, and int8* and int4* with scales a row or a group, zero points or minima, or rotated"
_BITWISE: dict[str, Invariance] = {"float32": "bitwise", "bfloat16": "bitwise"}
#: A packed weight's names for tensors of one number an output and group, or an output.
_SCALES = {"scales": "scale", "zeros": "zero", "mins": "min"}
#: How a word's eight nibbles, columns 0 to 7 from the lowest bits on, are put in order: (shift, mask) of bits that are
#: swapped, one after another. For int8 rows that gives 0 4 1 5 2 6 3 7: the low nibbles of four bytes against the first
#: four columns. For float rows, which come in pairs, it gives 0 2 4 6 1 3 5 7.
_BYTES, _NIBBLES = (8, 0x0000FF00), (4, 0x00F000F0)
_SWAPS = {"int8": (_BYTES, _NIBBLES), "float": (_NIBBLES, _BYTES)}


class LinearStruct(ctypes.Structure):
    """`linear::Linear`: a packed layer. Its pointers are borrowed from a packed weight's tensors."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("format", "gated", "activations", "scale_type", "min_type")),
        *((name, ctypes.c_int32) for name in ("sparse", "rotated")),
        *((name, ctypes.c_int64) for name in ("outs", "ins", "group", "groups_a_scale")),
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "zeros", "mins", "bias", "input_scale")),
    )


class OutputStruct(ctypes.Structure):
    """`linear::Output`: where results go, and what happens to them on the way."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
        ("adds", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


@frozen
class Packed:
    """The format of one packed weight.

    Attributes:
        source: the format it was packed from.
        kind: FP32, BF16, INT8 or INT4.
        name: the same for all, whatever they were packed from.
    """

    source: WeightFormat
    kind: int
    name: str = PACKED

    @property
    def is_integer(self) -> bool:
        """Whether it was packed from whole numbers."""
        return self.integers is not None

    @property
    def integers(self) -> IntegerFormat | None:
        """How whole numbers are multiplied: as their format says, rotated or not; of a sparse weight as `int8`."""
        if isinstance(self.source, SparseFormat):
            return IntegerFormat(8) if self.source.values == "int8" else None
        if isinstance(self.source, RotatedFormat):
            return self.source.source
        return self.source if isinstance(self.source, IntegerFormat) else None

    @property
    def keeps_floats(self) -> bool:
        """Whether activations stay floats."""
        return self.integers is None or self.integers.activations == "float"

    @property
    def group(self) -> int:
        """Columns whose products are summed and scaled apart; 0 where that is the whole row."""
        layout = self.integers
        if layout is None:
            return 0
        return layout.group or 0 if layout.activations == "float" else min(GROUP, layout.group or GROUP)

    @property
    def groups_a_scale(self) -> int:
        """Of such groups, how many share a weight scale; 0 where there is one an output."""
        layout = self.integers
        return layout.group // self.group if layout is not None and layout.group else 0

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight (N, C) that was packed, as its own format dequantizes it."""
        return unpack(weight).dequantize()

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return rows in the format that they were packed from."""
        return unpack(weight).rows(index)

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Refuse: panels are not cut."""
        del weight, dim, start, stop
        raise CompositionError("a weight is sharded before it is packed for the CPU kernels")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _panels(words_NS: torch.Tensor) -> torch.Tensor:
    """Lay (N, steps) words out in panels, (panels, steps, 48); outputs past N are 0."""
    outs, steps = words_NS.shape
    padded = functional.pad(words_NS, (0, 0, 0, -outs % PANEL)) if outs % PANEL else words_NS
    return _settled(padded.reshape(-1, PANEL, steps).transpose(1, 2))


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to memory of its own, aligned, whatever the tensor is a part of."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


def _rows(panels: torch.Tensor, outs: int) -> torch.Tensor:
    """Return the (N, steps) words of panels."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:outs]


def _words(tensor_NC: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad rows with zeros to a number of columns and return their bytes as int32 words."""
    missing = columns - tensor_NC.shape[1]  # nothing mostly, and then nothing need be copied
    padded = functional.pad(tensor_NC, (0, missing)) if missing else tensor_NC
    return padded.contiguous().view(torch.int32)


def pack(weight: Weight) -> Weight:
    """Lay a weight out in panels.

    Raises:
        CompositionError: a dtype or format that the kernels do not read.
    """
    if weight.format.name == "dense":
        return _pack_dense(weight)
    if isinstance(weight.format, IntegerFormat):
        return _pack_integers(weight, Packed(weight.format, INT8 if weight.format.bits == 8 else INT4))
    if isinstance(weight.format, RotatedFormat):
        return _pack_integers(weight, Packed(weight.format, INT8))
    if isinstance(weight.format, SparseFormat):
        return _pack_sparse(weight, weight.format)
    raise CompositionError(f"the CPU kernels do not read weights in the format {weight.format.name!r}")


def _pack_dense(weight: Weight) -> Weight:
    tensor = weight.dequantize()
    if tensor.dtype not in {torch.float32, torch.bfloat16}:
        raise CompositionError(f"the CPU kernels read float32 and bfloat16 weights, not {tensor.dtype}")
    is_bf16 = tensor.dtype == torch.bfloat16
    columns = _round_up(tensor.shape[1], 2) if is_bf16 else tensor.shape[1]
    panels = _panels(_words(tensor, columns))
    return Weight(Packed(weight.format, BF16 if is_bf16 else FP32), {"panels": panels}, weight.shape)


def _pack_integers(weight: Weight, packed: Packed) -> Weight:
    layout, (outs, ins) = packed.integers, weight.shape
    assert layout is not None
    numbers, columns = weight.tensors["weight"], _round_up(ins, 32 // layout.bits)
    if layout.bits == 4:
        words = _nibble_words(numbers, columns, layout)
    else:
        words = _words(numbers.view(torch.uint8) ^ 128, columns)  # q + 128
    tensors = {"panels": _panels(words)}
    for name, source in _SCALES.items():
        if source in weight.tensors:
            scales = weight.tensors[source]
            tensors[name] = _panels(scales[:, None] if scales.dim() == 1 else scales)
    if "input_scale" in weight.tensors:
        tensors["input_scale"] = weight.tensors["input_scale"].float().contiguous()
    return Weight(packed, tensors, (outs, ins))


def _pack_sparse(weight: Weight, layout: SparseFormat) -> Weight:
    kind = {"float32": FP32, "bfloat16": BF16, "int8": INT8}.get(layout.values, FP32)
    tensors = {"panels": sparse.to_panels(weight)}
    if "scale" in weight.tensors:
        tensors["scales"] = _panels(weight.tensors["scale"][:, None])
    return Weight(Packed(layout, kind), tensors, weight.shape)


def _unpack_sparse(weight: Weight, layout: SparseFormat) -> Weight:
    tensors = sparse.from_panels(weight.tensors["panels"], layout, weight.shape)
    if "scales" in weight.tensors:
        tensors["scale"] = _rows(weight.tensors["scales"], weight.shape[0]).flatten()
    return Weight(layout, tensors, weight.shape)


def _swap(words: torch.Tensor, swaps: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Swap bits under a mask with those so many places higher, in every word (Warren 2012, Hacker's Delight, 7-1)."""
    for shift, mask in swaps:
        moved = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
        words = (moved << shift).bitwise_xor_(moved).bitwise_xor_(words)
    return words


def _nibble_words(pairs: torch.Tensor, columns: int, layout: IntegerFormat) -> torch.Tensor:
    """Return (N, columns / 8) words of two numbers a byte, of which even columns are the low halves."""
    return _swap(_words(pairs, columns // 2), _SWAPS[layout.activations])


def _nibble_pairs(words: torch.Tensor, ins: int, layout: IntegerFormat) -> torch.Tensor:
    """Return what `_nibble_words` was given."""
    pairs = _swap(words, _SWAPS[layout.activations][::-1]).view(torch.uint8)
    return pairs[:, : _round_up(ins, 2) // 2].contiguous()


def unpack(weight: Weight) -> Weight:
    """Return the weight that was packed, bit for bit."""
    packed, (outs, ins) = weight.format, weight.shape
    assert isinstance(packed, Packed)
    if isinstance(packed.source, SparseFormat):
        return _unpack_sparse(weight, packed.source)
    words = _rows(weight.tensors["panels"], outs).clone(memory_format=torch.contiguous_format)
    if not packed.is_integer:
        dtype = torch.float32 if packed.kind == FP32 else torch.bfloat16
        return dense(words.view(dtype)[:, :ins].contiguous())
    if packed.kind == INT4:
        assert isinstance(packed.source, IntegerFormat)
        numbers = _nibble_pairs(words, ins, packed.source)
    else:
        octets = words.view(torch.uint8)[:, :ins]
        numbers = (octets ^ 128).contiguous().view(torch.int8)
    tensors = {"weight": numbers}
    for name, source in _SCALES.items():
        if name in weight.tensors:
            scales = _rows(weight.tensors[name], outs)
            tensors[source] = scales.contiguous() if packed.groups_a_scale else scales.flatten()
    if "input_scale" in weight.tensors:
        tensors["input_scale"] = weight.tensors["input_scale"]
    return Weight(packed.source, tensors, weight.shape)


def interleave(weight: Weight) -> Weight:
    """Return a packed gate-and-up weight (2F, C) with its panels in pairs, 48 outputs of the gate and the same of up.

    What `LinearStruct.gated` reads. F need not be a multiple of 48.
    """
    packed = weight.format
    assert isinstance(packed, Packed)
    tensors = {
        name: tensor if name == "input_scale" else _paired(tensor, weight.shape[0])
        for name, tensor in weight.tensors.items()
        if name != "panels" or not isinstance(packed.source, SparseFormat)
    }
    if isinstance(packed.source, SparseFormat):
        tensors["panels"] = sparse.interleaved(weight.tensors["panels"], packed.source, weight.shape)
    return Weight(packed, tensors, weight.shape)


def _paired(panels: torch.Tensor, outs: int) -> torch.Tensor:
    if outs % (2 * PANEL) == 0:  # the panels are there, and in another order
        return _settled(panels.view(2, -1, *panels.shape[1:]).transpose(0, 1)).flatten(0, 1)
    rows = _rows(panels, outs)
    gate, up = (functional.pad(half, (0, 0, 0, -half.shape[0] % PANEL)) for half in rows.chunk(2))
    pairs = torch.stack((gate.view(-1, PANEL, rows.shape[1]), up.view(-1, PANEL, rows.shape[1])), dim=1)
    return _settled(pairs.flatten(0, 1).transpose(1, 2))


def struct(
    weight: Weight, bias_N: torch.Tensor | None = None, *, gated: bool = False, dtype: torch.dtype = torch.float32
) -> LinearStruct:
    """Return what the kernels read of a packed weight. Weight and bias (float32, contiguous) must outlive it.

    Activations of the dtype become what the weight's format says; `dtype` is what they stay if it keeps them.
    """
    packed, tensors = weight.format, weight.tensors
    assert isinstance(packed, Packed)
    assert bias_N is None or (bias_N.dtype == torch.float32 and bias_N.is_contiguous())
    activations = torch.bfloat16 if packed.kind == BF16 else torch.float32 if packed.kind == FP32 else torch.int8
    if packed.is_integer and packed.keeps_floats:
        activations = dtype
    scales, mins = tensors.get("scales"), tensors.get("mins")
    return LinearStruct(
        format=packed.kind,
        gated=gated,
        activations=_NUMBERS[activations],
        scale_type=0 if scales is None else _NUMBERS[scales.dtype],
        min_type=0 if mins is None else _NUMBERS[mins.dtype],
        sparse=isinstance(packed.source, SparseFormat),
        rotated=isinstance(packed.source, RotatedFormat),
        outs=weight.shape[0] // 2 if gated else weight.shape[0],
        ins=weight.shape[1],
        group=packed.group,
        groups_a_scale=packed.groups_a_scale,
        bias=None if bias_N is None else bias_N.data_ptr(),
        **{name: tensors[name].data_ptr() for name in ("panels", *_SCALES, "input_scale") if name in tensors},
    )


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), in x's dtype. Rows are rounded to bfloat16 for bfloat16 weights."""
    if not isinstance(weight.format, Packed):
        return reference(x_TC, weight, bias_N)
    out_TN = torch.empty(x_TC.shape[0], weight.shape[0], dtype=x_TC.dtype)
    bias = None if bias_N is None else bias_N.float().contiguous()
    run(
        struct(weight, bias, dtype=x_TC.dtype), x_TC, OutputStruct(out_TN.data_ptr(), out_TN.stride(0), is_bf16(out_TN))
    )
    return out_TN


def is_bf16(tensor: torch.Tensor) -> int:
    """Whether numbers are bfloat16, for a C flag."""
    return int(tensor.dtype == torch.bfloat16)


def run(layer: LinearStruct, x_TC: torch.Tensor, out: OutputStruct, *, threads: int = 0) -> None:
    """Run one layer over rows of float32 or bfloat16; 0 threads is torch's number."""
    library = kernels.load()
    rows = x_TC if x_TC.stride(-1) == 1 else x_TC.contiguous()
    size = library.intarsia_linear_scratch
    size.restype = ctypes.c_int64
    num_bytes = size(ctypes.byref(layer), ctypes.c_int32(is_bf16(rows)), ctypes.c_int64(len(rows)))
    scratch = torch.empty(num_bytes + 64, dtype=torch.uint8) if num_bytes else None
    library.intarsia_linear(
        ctypes.byref(layer),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int32(is_bf16(rows)),
        ctypes.c_int64(rows.stride(0)),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(None if scratch is None else _round_up(scratch.data_ptr(), 64)),
        ctypes.byref(out),
        ctypes.c_int32(threads or torch.get_num_threads()),
    )


def embedding(ids_T: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return rows (T, E) of a quantized (V, E) weight, of which no others are dequantized."""
    return weight.rows(ids_T).dequantize().to(dtype)


def linear_kernels() -> list[Kernel]:
    """Return the kernels of ops on weights: dense and integers."""
    dtypes = frozenset(_BITWISE)
    return [
        Kernel(
            op="linear",
            call=linear,
            formats=FORMATS,
            dtypes=dtypes,
            invariance=_BITWISE,
            pack=pack,
            packed=PACKED,
        ),
        Kernel(op="embedding", call=embedding, formats=FORMATS - {"dense"}, dtypes=dtypes, invariance=_BITWISE),
    ]
