"""The quantizer of the formats `nf4_g64` and the like: `intarsia_nf4.layout` describes them.

Each group is divided by its largest magnitude, as it is stored, and rounded to the nearest levels. The widest gap
between levels is 0.304, so a number is off by at most 0.152 of its scale.

No kernel is needed: the references of the ops `linear` and `embedding` read any format, through its `dequantize`.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.types import Weight
from intarsia_nf4.layout import Nf4Format, nearest_levels, scales, store_scales
from intarsia_nf4.options import Nf4Options

#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22


def quantize(name: str, weight_NC: torch.Tensor, layout: Nf4Format) -> Weight:
    """Round a floating weight to NF4.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    num_rows = max(1, _CHUNK // max(1, weight_NC.shape[1]))
    pieces = [_quantize_rows(name, rows_NC, layout) for rows_NC in torch.split(weight_NC, num_rows)]
    tensors = {key: torch.cat([piece.tensors[key] for piece in pieces]) for key in pieces[0].tensors}
    return Weight(layout, tensors, tuple(weight_NC.shape))


def _quantize_rows(name: str, rows_NC: torch.Tensor, layout: Nf4Format) -> Weight:
    outs, ins = rows_NC.shape
    groups_NGS = functional.pad(rows_NC.float(), (0, -ins % layout.group)).view(outs, -1, layout.group)
    largest_NG = groups_NGS.abs().amax(-1)
    if not largest_NG.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which {layout.name} cannot represent")
    tensors = store_scales(largest_NG) if layout.double_quant else {"scale": largest_NG}
    divisor_NG = scales(Weight(layout, tensors, (outs, ins)))
    divisor_NG = torch.where(divisor_NG > 0, divisor_NG, 1.0)
    tensors["weight"] = nearest_levels(groups_NGS / divisor_NG[..., None], ins)
    return Weight(layout, tensors, (outs, ins))


@frozen(eq=False)
class Nf4Quantizer:
    """Takes every matrix of the layers, and the head, as its options say. Routers and embeddings stay."""

    options: Nf4Options

    @property
    def _layout(self) -> Nf4Format:
        return Nf4Format(self.options.group, self.options.double_quant)

    @property
    def format(self) -> str:
        """`nf4_g64` and the like."""
        return self._layout.name

    @property
    def column_step(self) -> int:
        """Columns that share a scale: where ranks share a model, they stay together."""
        return self._layout.column_step

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Half a byte a number, and the scales: four bytes a group, or one and eight more a row."""
        del name
        return self._layout.num_bytes(shape)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in NF4; raise CheckpointError that names it where it holds NaN or infinity."""
        return quantize(name, weight.dequantize(), self._layout)


def build(context: PartContext) -> Nf4Quantizer:
    """Make the part."""
    return Nf4Quantizer(context.options)
