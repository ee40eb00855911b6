"""Linear layers by our own kernels: weights packed into panels while they load, then any number of rows.

| weight format | activations become | result |
| --- | --- | --- |
| `dense` float32 | float32 | one chain of fused multiply-adds an output |
| `dense` bfloat16 | bfloat16 | as above, sums in fp32 |
| `int8` | int8, a scale a token and 64 columns | exact int32 sums a group, then the scales |
| `int4_g*` | int8, a scale a token and group | exact int32 sums a group, then the scales |

A packed weight (format `cpu`) has `panels`, int32 words (panels, steps, 48): the words of 48 outputs lie side by side,
step by step along the columns. `scales` and `zeros` lie as the header `src/activations.h` says. Packing moves bits and
computes nothing, so a packed weight can be unpacked.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

import ctypes

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.ops import linear as reference
from intarsia.protocols import Kernel
from intarsia.types import Invariance, Weight, WeightFormat, dense
from intarsia_cpu import build as kernels

#: Outputs a panel.
PANEL = 48
#: Columns that share an activation scale, at most.
GROUP = 64
#: Name of the packed format.
PACKED = "cpu"
FP32, BF16, INT8, INT4 = range(4)
#: Weight format -> the columns that share a weight scale.
INT4_GROUPS = {f"int4_g{group}{zero}": group for group in (32, 64, 128) for zero in ("", "_zero")}
_BITWISE: dict[str, Invariance] = {"float32": "bitwise", "bfloat16": "bitwise"}


class LinearStruct(ctypes.Structure):
    """`linear::Linear`: a packed layer. Its pointers are borrowed from a packed weight's tensors."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("outs", ctypes.c_int64),
        ("ins", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
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
        group: columns that share an activation scale; 0 where activations have none.
        name: the same for all, whatever they were packed from.
    """

    source: WeightFormat
    kind: int
    group: int = 0
    name: str = PACKED

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
    padded = functional.pad(words_NS, (0, 0, 0, -outs % PANEL))
    return padded.view(-1, PANEL, steps).transpose(1, 2).contiguous()


def _rows(panels: torch.Tensor, outs: int) -> torch.Tensor:
    """Return the (N, steps) words of panels."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:outs]


def _words(tensor_NC: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad rows with zeros to a number of columns and return their bytes as int32 words."""
    padded = functional.pad(tensor_NC, (0, columns - tensor_NC.shape[1]))
    return padded.contiguous().view(torch.int32)


def pack(weight: Weight) -> Weight:
    """Lay a weight out in panels.

    Raises:
        CompositionError: a dtype or format that the kernels do not read.
    """
    if weight.format.name == "dense":
        return _pack_dense(weight)
    if weight.format.name == "int8":
        return _pack_int8(weight)
    if weight.format.name in INT4_GROUPS:
        return _pack_int4(weight)
    raise CompositionError(f"the CPU kernels do not read weights in the format {weight.format.name!r}")


def _pack_dense(weight: Weight) -> Weight:
    tensor = weight.dequantize()
    if tensor.dtype not in {torch.float32, torch.bfloat16}:
        raise CompositionError(f"the CPU kernels read float32 and bfloat16 weights, not {tensor.dtype}")
    is_bf16 = tensor.dtype == torch.bfloat16
    columns = _round_up(tensor.shape[1], 2) if is_bf16 else tensor.shape[1]
    panels = _panels(_words(tensor, columns))
    return Weight(Packed(weight.format, BF16 if is_bf16 else FP32), {"panels": panels}, weight.shape)


def _pack_int8(weight: Weight) -> Weight:
    outs, ins = weight.shape
    offset = weight.tensors["weight"].view(torch.uint8) ^ 128  # q + 128
    scales = functional.pad(weight.tensors["scale"].float(), (0, -outs % PANEL))
    tensors = {"panels": _panels(_words(offset, _round_up(ins, GROUP))), "scales": scales.contiguous()}
    return Weight(Packed(weight.format, INT8, GROUP), tensors, weight.shape)


def _pack_int4(weight: Weight) -> Weight:
    outs, ins = weight.shape
    weight_group = INT4_GROUPS[weight.format.name]
    group = min(GROUP, weight_group)
    columns = _round_up(ins, group)
    pairs = weight.tensors["weight"]
    pairs = functional.pad(pairs, (0, columns // 2 - pairs.shape[1]))
    # Eight columns a word: 0 to 3 in the low nibbles of its bytes, 4 to 7 in the high ones.
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(outs, columns // 8, 2, 4)
    words = (numbers[:, :, 0] | (numbers[:, :, 1] << 4)).contiguous().view(torch.int32).view(outs, columns // 8)
    of_group = torch.arange(columns // group) * group // weight_group
    tensors = {"panels": _panels(words), "scales": _panels(weight.tensors["scale"].bfloat16()[:, of_group])}
    if "zero" in weight.tensors:
        tensors["zeros"] = _panels(weight.tensors["zero"][:, of_group])
    return Weight(Packed(weight.format, INT4, group), tensors, weight.shape)


def unpack(weight: Weight) -> Weight:
    """Return the weight that was packed, bit for bit."""
    packed, (outs, ins) = weight.format, weight.shape
    assert isinstance(packed, Packed)
    words = _rows(weight.tensors["panels"], outs).contiguous()
    if packed.kind in {FP32, BF16}:
        dtype = torch.float32 if packed.kind == FP32 else torch.bfloat16
        return dense(words.view(dtype)[:, :ins].contiguous())
    if packed.kind == INT8:
        numbers = (words.view(torch.uint8)[:, :ins] ^ 128).view(torch.int8).contiguous()
        return Weight(packed.source, {"weight": numbers, "scale": weight.tensors["scales"][:outs]}, weight.shape)
    octets = words.view(torch.uint8).view(outs, -1, 1, 4)
    numbers = torch.cat((octets & 15, octets >> 4), dim=2).view(outs, -1)[:, : _round_up(ins, 2)]
    pairs = (numbers[:, 0::2] | (numbers[:, 1::2] << 4)).contiguous()
    step = max(1, INT4_GROUPS[packed.source.name] // packed.group)
    tensors = {"weight": pairs, "scale": _rows(weight.tensors["scales"], outs)[:, ::step].contiguous()}
    if "zeros" in weight.tensors:
        tensors["zero"] = _rows(weight.tensors["zeros"], outs)[:, ::step].contiguous()
    return Weight(packed.source, tensors, weight.shape)


def interleave(weight: Weight) -> Weight:
    """Return a packed gate-and-up weight (2F, C) with its panels in pairs, 48 outputs of the gate and the same of up.

    What `LinearStruct.gated` reads. F need not be a multiple of 48.
    """
    packed = weight.format
    assert isinstance(packed, Packed)
    tensors = {name: _paired(tensor, weight.shape[0]) for name, tensor in weight.tensors.items()}
    return Weight(packed, tensors, weight.shape)


def _paired(panels: torch.Tensor, outs: int) -> torch.Tensor:
    flat = panels.dim() == 1  # one number an output
    rows = panels[:outs, None] if flat else _rows(panels, outs)
    gate, up = (functional.pad(half, (0, 0, 0, -half.shape[0] % PANEL)) for half in rows.chunk(2))
    pairs = torch.stack((gate.view(-1, PANEL, rows.shape[1]), up.view(-1, PANEL, rows.shape[1])), dim=1)
    return pairs.reshape(-1).contiguous() if flat else pairs.flatten(0, 1).transpose(1, 2).contiguous()


def struct(weight: Weight, bias_N: torch.Tensor | None = None, *, gated: bool = False) -> LinearStruct:
    """Return what the kernels read of a packed weight. Weight and bias (float32, contiguous) must outlive it."""
    packed, tensors = weight.format, weight.tensors
    assert isinstance(packed, Packed)
    assert bias_N is None or (bias_N.dtype == torch.float32 and bias_N.is_contiguous())
    return LinearStruct(
        format=packed.kind,
        gated=gated,
        outs=weight.shape[0] // 2 if gated else weight.shape[0],
        ins=weight.shape[1],
        group=packed.group,
        panels=tensors["panels"].data_ptr(),
        scales=tensors["scales"].data_ptr() if "scales" in tensors else None,
        zeros=tensors["zeros"].data_ptr() if "zeros" in tensors else None,
        bias=None if bias_N is None else bias_N.data_ptr(),
    )


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), in x's dtype. Rows are rounded to bfloat16 for bfloat16 weights."""
    if not isinstance(weight.format, Packed):
        return reference(x_TC, weight, bias_N)
    out_TN = torch.empty(x_TC.shape[0], weight.shape[0], dtype=x_TC.dtype)
    bias = None if bias_N is None else bias_N.float().contiguous()
    run(struct(weight, bias), x_TC, OutputStruct(out_TN.data_ptr(), out_TN.stride(0), is_bf16(out_TN)))
    return out_TN


def is_bf16(tensor: torch.Tensor) -> int:
    """Whether numbers are bfloat16, for a C flag."""
    return int(tensor.dtype == torch.bfloat16)


def run(layer: LinearStruct, x_TC: torch.Tensor, out: OutputStruct, *, threads: int = 0) -> None:
    """Run one layer over rows of float32 or bfloat16; 0 threads is torch's number."""
    library = kernels.load("linear")
    rows = x_TC if x_TC.stride(-1) == 1 else x_TC.contiguous()
    as_is = (layer.format == FP32 and not is_bf16(rows)) or (layer.format == BF16 and is_bf16(rows))
    # A pair of bf16 is read at a time, so odd rows are copied to where something is behind them.
    scratch = None
    if not as_is or (layer.format == BF16 and layer.ins % 2):
        size = library.intarsia_linear_scratch
        size.restype = ctypes.c_int64
        scratch = torch.empty(size(ctypes.byref(layer), ctypes.c_int64(len(rows))) + 64, dtype=torch.uint8)
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
    """Return the kernels of ops on weights: dense, int8 and int4."""
    quantized = frozenset({"int8", *INT4_GROUPS})
    dtypes = frozenset(_BITWISE)
    return [
        Kernel(
            op="linear",
            call=linear,
            formats=quantized | {"dense"},
            dtypes=dtypes,
            invariance=_BITWISE,
            pack=pack,
            packed=PACKED,
        ),
        Kernel(op="embedding", call=embedding, formats=quantized, dtypes=dtypes, invariance=_BITWISE),
    ]
