"""How far a quantized weight may be from the numbers that it was made of: what its format's bits and groups give.

| format | a number is off by |
| --- | --- |
| `int8*` | half a step; a step is the largest magnitude of its group, or row, / 127 |
| `int8*_rotated` | likewise, of rotated numbers; an error is spread over its block |
| `int4*` | 0.58 of a step, which is the largest magnitude of its group / 8; beyond seven steps by one |
| `int4*_zero`, `int*_min` | a step of its group's range, 0 included; half of it for the number, half for the offset |
| `sparse24*` | itself, where it is one of at most two of four that are dropped; else nothing, or as of `int8` |
| others | 4 / 2**bits of its group's largest magnitude; bits are the whole ones that the format takes a number |

Steps are of the exact numbers, and not what a weight says of itself, with a little more for scales that are rounded to
16 bits. Where a weight has an `input_scale`, its columns are measured before they are divided by it. Below the smallest
normal float, 2**-126, no format has its bits: a number may always be off by as much.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.nn import functional

from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.rotated import RotatedFormat, rotate, spread
from intarsia.quantizing.sparse import GROUP, KEPT, SparseFormat
from intarsia.types import Weight

__all__ = ["bound", "check_layout", "share_of_largest"]

#: The smallest normal float32.
_SMALLEST = 2.0**-126
#: With what rounded scales add: one in bfloat16 is up to 2**-8 of itself off, and seven steps are by seven times that.
_HALF, _WHOLE = 0.51, 1.04
#: Of 64 numbers' sum in float32.
_ROTATING = 64 * 2.0**-24
#: Of steps of a largest magnitude / 8: scales may also be of / 7, where -8 is not used.
_SYMMETRIC = 0.58
#: Half a unit in the last place.
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def bound(exact_NC: torch.Tensor, weight: Weight) -> torch.Tensor | None:
    """Return how far each number may be off, (N, C) in float64, see the module; None for formats not known here.

    Args:
        exact_NC: the numbers that the weight was made of, in float64.
        weight: what was made.
    """
    layout = weight.format
    if isinstance(layout, SparseFormat):
        return _sparse(exact_NC, weight.dequantize().double(), layout) + _SMALLEST
    if isinstance(layout, IntegerFormat | RotatedFormat):
        scale = weight.tensors.get("input_scale")
        if scale is None:
            return _scaled(exact_NC, layout) + _SMALLEST
        return _scaled(exact_NC / scale.double(), layout) * scale.double() + _SMALLEST
    return None


def _scaled(exact_NC: torch.Tensor, layout: IntegerFormat | RotatedFormat) -> torch.Tensor:
    if isinstance(layout, IntegerFormat):
        return _integers(exact_NC, layout)
    # Sums of the rotation are rounded besides, in float32.
    return spread(_integers(rotate(exact_NC), layout.source)) + spread(exact_NC.abs()) * _ROTATING


def share_of_largest(exact_NC: torch.Tensor, share: float, group: int | None) -> torch.Tensor:
    """Return this share of the largest magnitude in each number's group of columns, or row, (N, C)."""
    return share * _spread(exact_NC.abs(), group) + _SMALLEST


def _by_group(numbers_NC: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return (N, G, S), a last group filled with zeros."""
    columns = numbers_NC.shape[1]
    width = group or columns
    return functional.pad(numbers_NC, (0, -columns % width)).view(len(numbers_NC), -1, width)


def _spread(numbers_NC: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the largest number of each one's group, (N, C)."""
    groups_NGS = _by_group(numbers_NC, group)
    return groups_NGS.amax(-1, keepdim=True).expand_as(groups_NGS).flatten(1)[:, : numbers_NC.shape[1]]


def _integers(exact_NC: torch.Tensor, layout: IntegerFormat) -> torch.Tensor:
    if layout.offset != "none":
        spread = _spread(exact_NC.clamp(min=0), layout.group) + _spread((-exact_NC).clamp(min=0), layout.group)
        return _WHOLE * spread / ((1 << layout.bits) - 1)
    largest_NC = _spread(exact_NC.abs(), layout.group)
    if layout.bits == 8:
        return _HALF * largest_NC / 127
    step_NC = largest_NC / 8
    return torch.where(exact_NC.abs() <= 7 * step_NC, _SYMMETRIC, _WHOLE) * step_NC


def _sparse(exact_NC: torch.Tensor, found_NC: torch.Tensor, layout: SparseFormat) -> torch.Tensor:
    if layout.values == "int8":
        kept_NC = torch.full_like(exact_NC, _HALF / 127) * exact_NC.abs().amax(1, keepdim=True)
    else:
        kept_NC = exact_NC.abs() * _ROUNDING[layout.values]
    is_dropped = (found_NC == 0) & (exact_NC.abs() > kept_NC)
    many_NC = _by_group(is_dropped.double(), GROUP).sum(-1, keepdim=True).expand(-1, -1, GROUP).flatten(1)
    return torch.where(is_dropped & (many_NC[:, : exact_NC.shape[1]] <= GROUP - KEPT), exact_NC.abs(), kept_NC)


def check_layout(weight: Weight) -> None:
    """Raise AssertionError unless a weight's tensors are those that its format is documented to have.

    `intarsia.quantizing.integers` and `.sparse` document theirs; of others nothing is known.
    """
    if isinstance(weight.format, RotatedFormat):
        _check_integers(weight, weight.format.source)
    elif isinstance(weight.format, IntegerFormat):
        _check_integers(weight, weight.format)
    elif isinstance(weight.format, SparseFormat):
        _check_sparse(weight, weight.format)


#: A format's tensors: the dtypes that each may have, and its shape.
_Tensors: TypeAlias = dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]


def _check(weight: Weight, wanted: _Tensors) -> None:
    assert weight.tensors.keys() == wanted.keys(), (
        f"{weight.format.name} has the tensors {sorted(wanted)}, and here are {sorted(weight.tensors)}"
    )
    for key, (dtypes, shape) in wanted.items():
        tensor = weight.tensors[key]
        assert tensor.dtype in dtypes, f"{key}: {tensor.dtype}, and {weight.format.name} has {dtypes}"
        assert tuple(tensor.shape) == shape, f"{key}: {tuple(tensor.shape)}, and {weight.format.name} has {shape}"
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), f"{key} holds NaN or infinity"


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check_integers(weight: Weight, layout: IntegerFormat) -> None:
    outs, ins = weight.shape
    grouped = (outs, 1 if layout.group is None else -(-ins // layout.group))
    wanted: _Tensors = {
        "weight": ((torch.int8,), (outs, ins)) if layout.bits == 8 else ((torch.uint8,), (outs, -(-ins // 2))),
        "scale": ((torch.float32,), (outs,)) if layout.group is None else (_FLOATS, grouped),
    }
    if layout.offset == "zero":
        wanted["zero"] = ((torch.uint8,), grouped)
    if layout.offset == "min":
        wanted["min"] = (_FLOATS, grouped)
    if "input_scale" in weight.tensors:
        wanted["input_scale"] = ((torch.float32,), (ins,))
    _check(weight, wanted)
    if layout.offset == "zero":
        assert int(weight.tensors["zero"].max()) <= 15, "a zero point is more than 4 bits hold"


def _check_sparse(weight: Weight, layout: SparseFormat) -> None:
    outs, ins = weight.shape
    groups = -(-ins // GROUP)
    wanted: _Tensors = {
        "values": ((getattr(torch, layout.values),), (outs, KEPT * groups)),
        "indices": ((torch.uint8,), (outs, -(-groups // 2))),
    }
    if layout.values == "int8":
        wanted["scale"] = ((torch.float32,), (outs,))
    _check(weight, wanted)
    halves = layout.half_bytes(weight)
    assert bool(((halves & 3) < (halves >> 2)).all()), "of a group's two columns the first is not before the second"
