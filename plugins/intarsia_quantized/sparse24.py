"""2:4 sparse matrices in folders: the published legacy format, and our own.

compressed-tensors to version 0.13 wrote `sparse-24-bitmask`, which newer ones and transformers refuse:

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `compressed` | a float, or int8 | (N, C / 2) | the two numbers that each group of four columns keeps, in their order |
| `bitmask` | uint8 | (N, ceil(C / 8)) | a bit a column, from the lowest up: whether it is kept |
| `shape` | int64 | (2,) or (2, 1) | N, C |
| `weight_scale` | a float | (N, 1) | of int8: what a row is multiplied by |

Our own, of `quant_method` `intarsia` and `format` `sparse24`, holds the weight format's tensors as
`intarsia.quantizing.sparse` describes them:

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `weight_values` | a float, or int8 | (N, 2 G) | |
| `weight_indices` | uint8 | (N, ceil(G / 2)) | |
| `weight_shape` | int64 | (2,) | N, C |
| `weight_scale` | float32 | (N,) | of int8 |

Shape legend: N out features, C in features, G groups of four columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from intarsia.checkpoints import SafetensorsTensor
from intarsia.errors import CheckpointError
from intarsia.families import Fields
from intarsia.quantizing.sparse import GROUP, KEPT, SparseFormat, SparseValues, compress
from intarsia.types import StoredTensor, Weight
from intarsia_quantized.modules import SCALES, Module, decoded
from intarsia_quantized.options import QuantizedOptions
from intarsia_quantized.stored import check_scales

#: What our own folders say of themselves.
METHOD, FORMAT, VERSION = "intarsia", "sparse24", 1
LEGACY = "sparse-24-bitmask"
#: The legacy format's tensors of a module.
LEGACY_PARTS = ("compressed", "bitmask", "shape", "weight_scale")
_PARTS = ("weight_values", "weight_indices", "weight_shape", "weight_scale")
_VALUES: Mapping[str, SparseValues] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}
_CHUNK = 1 << 20


@frozen(eq=False)
class SparseTensor:
    """A 2:4 sparse matrix as `intarsia.types.StoredWeight` has it."""

    name: str
    shape: tuple[int, int]
    weight_format: SparseFormat
    num_bytes: int
    decode: Callable[[], Weight] = field(repr=False)

    @property
    def format(self) -> str:
        """How the file stores it."""
        return f"SPARSE24_{self.weight_format.values}"

    def read_weight(self) -> Weight:
        """Return the weight in its format; raise CheckpointError that names it where it is malformed."""
        return self.decode()

    def read(self, out: torch.Tensor) -> None:
        """Write its numbers and zeros into `out`, a few rows at a time."""
        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} is not {self.shape}"
        weight = self.read_weight()
        num_rows = max(1, _CHUNK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            out[rows].copy_(weight.rows(rows).dequantize())


def _sizes(module: Module, part: str, beside: str) -> tuple[int, int]:
    """Return what a tensor of a shape says."""
    tensor = module.need(part, beside, ("I64", "I32"))
    if math.prod(tensor.shape) != 2:
        raise CheckpointError(f"tensor {tensor.name!r} has the shape {tensor.shape}, not (2,)")
    outs, ins = tensor.load().flatten().tolist()
    if outs < 1 or ins < 1:
        raise CheckpointError(f"tensor {tensor.name!r} says {outs} by {ins}")
    return outs, ins


def _scale(module: Module, name: str, outs: int) -> torch.Tensor:
    scale = module.tensors["weight_scale"].load().float().reshape(-1)
    check_scales(name, scale)
    return scale.expand(outs).contiguous()


def legacy(module: Module) -> StoredTensor:
    """Return a matrix of the legacy format.

    Raises:
        CheckpointError: its tensors do not fit each other; names them.
    """
    beside = "compressed"
    outs, ins = _sizes(module, "shape", beside)
    if ins % GROUP:
        raise CheckpointError(f"tensor {module.name}.shape says {ins} columns, not a multiple of {GROUP}")
    stored = module.need(beside, beside, tuple(_VALUES), (outs, ins // 2))
    module.need("bitmask", beside, ("U8",), (outs, -(-ins // 8)))
    values = _VALUES[stored.format]
    if values == "int8":
        scales = module.need("weight_scale", beside, SCALES)
        if scales.shape not in ((outs, 1), (outs,), (1,), ()):
            raise CheckpointError(f"tensor {scales.name!r} has the shape {scales.shape}, not ({outs}, 1)")
    name = f"{module.name}.weight"

    def decode() -> Weight:
        bits = np.unpackbits(module.tensors["bitmask"].load().numpy(), axis=1, count=ins, bitorder="little")
        mask = torch.from_numpy(bits).bool()
        if not bool((mask.view(outs, -1, GROUP).sum(-1) == KEPT).all()):
            raise CheckpointError(f"tensor {module.name}.bitmask keeps other than {KEPT} of {GROUP} columns")
        numbers = torch.zeros(outs, ins, dtype=getattr(torch, values))
        numbers[mask] = stored.load().flatten()
        return compress(name, numbers, mask, _scale(module, name, outs) if values == "int8" else None)

    return SparseTensor(name, (outs, ins), SparseFormat(values), module.num_bytes(LEGACY_PARTS), decode)


def decode(
    tensors: Mapping[str, SafetensorsTensor], fields: Fields, options: QuantizedOptions
) -> dict[str, StoredTensor]:
    """Return the tensors of one of our own folders by their plain names.

    Raises:
        CheckpointError: the config has a value that is not known, or does not fit its tensors.
    """
    del options  # products of sparse weights have one way with activations
    fields.choice("format", {FORMAT: None})
    if fields.size("version") != VERSION:
        raise fields.wrong("version", str(VERSION))
    return decoded(tensors, _PARTS, "weight_values", _own)


def _own(module: Module) -> StoredTensor:
    beside = "weight_values"
    outs, ins = _sizes(module, "weight_shape", beside)
    groups = -(-ins // GROUP)
    stored = module.need(beside, beside, tuple(_VALUES), (outs, KEPT * groups))
    module.need("weight_indices", beside, ("U8",), (outs, -(-groups // 2)))
    layout, name = SparseFormat(_VALUES[stored.format]), f"{module.name}.weight"
    if layout.values == "int8":
        module.need("weight_scale", beside, ("F32",), (outs,))

    def decode() -> Weight:
        indices = module.tensors["weight_indices"].load()
        for halves in (indices & 15, indices >> 4):
            if not bool(((halves & 3) < (halves >> 2)).all()):
                raise CheckpointError(f"tensor {module.name}.weight_indices names columns out of their order")
        tensors = {"values": stored.load(), "indices": indices}
        if layout.values == "int8":
            tensors["scale"] = _scale(module, name, outs)
        half = indices[:, -1] >> (0 if groups % 2 else 4)
        last = torch.stack((half & 3, half >> 2 & 3), dim=-1)
        if bool(((last >= ins - GROUP * (groups - 1)) & (tensors["values"][:, -KEPT:] != 0)).any()):
            raise CheckpointError(f"tensor {module.name}.weight_indices names columns past the last, {ins - 1}")
        return Weight(layout, tensors, (outs, ins))

    return SparseTensor(name, (outs, ins), layout, module.num_bytes(_PARTS), decode)


def store(module: str, weight: Weight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a module of our own format.

    Args:
        module: its name.
        weight: in a SparseFormat.
        dtype: of values that are floats.
    """
    values = weight.tensors["values"]
    tensors = {
        "weight_values": values.to(dtype) if values.is_floating_point() else values,
        "weight_indices": weight.tensors["indices"],
        "weight_shape": torch.tensor(weight.shape),
    }
    if "scale" in weight.tensors:
        tensors["weight_scale"] = weight.tensors["scale"]
    return {f"{module}.{key}": tensor.contiguous() for key, tensor in tensors.items()}


def quantization_config() -> dict[str, Any]:
    """Return the config of one of our own folders."""
    return {"quant_method": METHOD, "format": FORMAT, "version": VERSION}
