"""The quantizer `sparse24`: pruning to 2:4, by magnitude or by Wanda. `intarsia.quantizing.sparse` has the format.

Magnitude keeps the two largest numbers of every four columns. Wanda (Sun et al. 2023, A Simple and Effective Pruning
Approach for Large Language Models) weighs each with the root mean square of the input that it multiplies, as
calibration has seen it. A weight that is 2:4 sparse keeps its numbers: what is 0 is never kept before what is not.

With int8 values the numbers that are kept are rounded to nearest, with a scale of the row's largest magnitude / 127.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration
from intarsia.quantizing.options import CALIBRATION, check_calibration
from intarsia.quantizing.sparse import SparseFormat, best_two, compress
from intarsia.types import Dtype, Weight
from intarsia_sparse.options import SparseOptions

#: Numbers pruned at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 21


def prune(
    name: str, weight_NC: torch.Tensor, importance_C: torch.Tensor | None = None, *, to_int8: bool = False
) -> Weight:
    """Prune a floating weight to 2:4.

    Args:
        name: its canonical name.
        weight_NC: its numbers.
        importance_C: what magnitudes are multiplied by, at least 0; None is 1.
        to_int8: round what is kept.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    num_rows = max(1, _CHUNK // max(1, weight_NC.shape[1]))
    parts = [_prune(name, rows, importance_C, to_int8=to_int8) for rows in torch.split(weight_NC, num_rows)]
    tensors = {key: torch.cat([part.tensors[key] for part in parts]) for key in parts[0].tensors}
    return Weight(parts[0].format, tensors, tuple(weight_NC.shape))


def _prune(name: str, rows_NC: torch.Tensor, importance_C: torch.Tensor | None, *, to_int8: bool) -> Weight:
    if not rows_NC.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which cannot be pruned")
    scores = rows_NC.abs().float()
    if importance_C is not None:
        # In double precision no product of two floats overflows, or underflows to a tie.
        scores = scores.double() * importance_C.to(scores.device)
    mask = best_two(scores.masked_fill_(rows_NC == 0, -1.0))
    if not to_int8:
        return compress(name, rows_NC, mask)
    kept = torch.where(mask, rows_NC, 0).float()
    scale = kept.abs().amax(1) / 127
    numbers = kept / torch.where(scale > 0, scale, 1.0)[:, None]
    return compress(name, numbers.round_().clamp_(-127, 127).to(torch.int8), mask, scale)


@frozen(eq=False)
class SparseQuantizer:
    """Takes every matrix of the layers, and more as its options say. Routers stay.

    Attributes:
        dtype: of values that are not rounded.
        calibration: where the method weighs by inputs.
    """

    options: SparseOptions
    dtype: Dtype
    calibration: Calibration | None

    @property
    def _format(self) -> SparseFormat:
        assert self.dtype != "auto"
        return SparseFormat("int8" if self.options.values == "int8" else self.dtype)

    @property
    def format(self) -> str:
        """`sparse24` or `sparse24_int8`."""
        return self._format.name

    @property
    def column_step(self) -> int:
        """Columns that share a scale or a group: where ranks share a model, they stay together."""
        return self._format.column_step

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Two values and half a byte a group of four; raise ConfigError where the calibration knows it not."""
        self._importance(name, shape[1])
        return self._format.num_bytes(shape)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in 2:4; raise CheckpointError that names it where it holds NaN or infinity."""
        numbers = weight.dequantize().to(getattr(torch, self.dtype))
        importance = self._importance(name, weight.shape[1])
        return prune(name, numbers, importance, to_int8=self.options.values == "int8")

    def _importance(self, name: str, columns: int) -> torch.Tensor | None:
        if self.calibration is None:
            return None
        return self.calibration.of(name, columns, CALIBRATION).mean_square.double().sqrt()


def build(context: PartContext) -> SparseQuantizer:
    """Make the part.

    Raises:
        ConfigError: the method reads a calibration and none is given, or the other way round, or the file is none.
    """
    options: SparseOptions = context.options
    weighs = options.method == "wanda"
    needed_by = "the method 'wanda'" if weighs else ""
    read_for = f"the method 'wanda', and not for {options.method!r}; quantizer.method = 'wanda' asks for it"
    check_calibration(options.calibration, needed_by, "" if weighs else read_for)
    calibration = Calibration.open(Path(options.calibration), CALIBRATION) if weighs else None
    return SparseQuantizer(options, context.engine.dtype, calibration)
