"""2:4 sparse weights in panels: what `src/sparse_tiles.h` reads. Packing moves bits and computes nothing.

Shape legend: N out features, C in features, G groups of four columns, P panels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.quantizing.sparse import GROUP, KEPT, SparseFormat, pack_half_bytes
from intarsia.types import Weight

#: Outputs a panel.
PANEL = 48
#: Outputs whose masks lie together, of floats.
_BLOCK = 16
_MASK_BYTES = PANEL // 2
#: A group's half byte -> a bit for each column that it keeps; and back.
_MASKS, _HALVES = torch.zeros(2, 16, dtype=torch.uint8)
for _first in range(GROUP):
    for _second in range(_first + 1, GROUP):
        _MASKS[_first | _second << 2] = 1 << _first | 1 << _second
        _HALVES[1 << _first | 1 << _second] = _first | _second << 2
#: Of outputs past N, whose values are 0.
_ANY_MASK = 3


def to_panels(weight: Weight) -> torch.Tensor:
    """Return the steps of each panel, bytes (P, G, bytes a step).

    Raises:
        CompositionError: values of a dtype that the kernels do not read.
    """
    layout = weight.format
    assert isinstance(layout, SparseFormat)
    if layout.values == "float16":
        raise CompositionError("the CPU kernels read sparse weights of float32, bfloat16 and int8, not of float16")
    missing, groups = -weight.shape[0] % PANEL, -(-weight.shape[1] // GROUP)
    values = functional.pad(weight.tensors["values"], (0, 0, 0, missing)).view(-1, PANEL, groups, KEPT)
    order = (0, 2, 3, 1) if layout.values == "float32" else (0, 2, 1, 3)
    numbers = values.permute(order).contiguous().flatten(2).view(torch.uint8)
    masks = functional.pad(_MASKS[layout.half_bytes(weight).int()], (0, 0, 0, missing), value=_ANY_MASK)
    masks_PGN = masks.view(-1, PANEL, groups).transpose(1, 2)
    return torch.cat((numbers, _halved(masks_PGN) if layout.values == "int8" else _bits(masks_PGN)), dim=-1)


def from_panels(panels: torch.Tensor, layout: SparseFormat, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return `values` and `indices` of the weight (N, C) whose steps these are."""
    dtype: torch.dtype = getattr(torch, layout.values)
    groups = panels.shape[1]
    numbers = panels[..., :-_MASK_BYTES].contiguous().view(dtype)
    if layout.values == "float32":
        values = numbers.view(-1, groups, KEPT, PANEL).permute(0, 3, 1, 2)
    else:
        values = numbers.view(-1, groups, PANEL, KEPT).transpose(1, 2)
    stored = panels[..., -_MASK_BYTES:]
    masks_PGN = _whole(stored) if layout.values == "int8" else _columns(stored)
    halves = _HALVES[masks_PGN.int()].transpose(1, 2).reshape(-1, groups)[: shape[0]]
    return {"values": values.reshape(-1, KEPT * groups)[: shape[0]], "indices": pack_half_bytes(halves)}


def interleaved(panels: torch.Tensor, layout: SparseFormat, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the panels of a gate-and-up weight (2F, C) in pairs, 48 outputs of the gate and the same of up."""
    whole = Weight(layout, from_panels(panels, layout, shape), shape)
    middle = shape[0] // 2
    gate, up = (to_panels(whole.rows(part)) for part in (slice(middle), slice(middle, None)))
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _halved(masks_PGN: torch.Tensor) -> torch.Tensor:
    """Return masks two a byte, even outputs in the low half."""
    return masks_PGN[..., 0::2] | masks_PGN[..., 1::2] << 4


def _whole(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(2)


def _bits(masks_PGN: torch.Tensor) -> torch.Tensor:
    """Return what masks drop, column by column, a bit an output, for each 16 of them."""
    blocks = (~masks_PGN).reshape(*masks_PGN.shape[:2], -1, 1, _BLOCK)
    bits = (blocks >> torch.arange(GROUP, dtype=torch.uint8)[:, None] & 1).reshape(*masks_PGN.shape[:2], -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _columns(stored: torch.Tensor) -> torch.Tensor:
    bits = (~stored[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)
    columns = bits.view(*stored.shape[:2], -1, GROUP, _BLOCK)
    return (columns << torch.arange(GROUP, dtype=torch.uint8)[:, None]).sum(-2, dtype=torch.uint8).flatten(2)
