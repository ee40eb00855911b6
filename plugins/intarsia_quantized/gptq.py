"""GPTQ folders (Frantar et al. 2022), as AutoGPTQ and GPTQModel write them.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `qweight` | int32 | (C bits / 32, N) | q from 0, columns packed from the lowest bits up |
| `qzeros` | int32 | (G, N bits / 32) | zero points, likewise; `gptq` stores each word less 1 in every number |
| `scales` | float | (G, N) | |
| `g_idx` | int32 | (C,) | the group of each column |

The weight is (q - zero) * scale, with the scale and the zero point of the column's group. With `desc_act`, columns were
quantized in the order of their activations, and a group's columns lie anywhere: such a matrix is read as floats, since
no format in memory has permuted columns.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen

from intarsia.checkpoints import SafetensorsTensor
from intarsia.errors import CheckpointError
from intarsia.families import Fields
from intarsia.types import StoredTensor
from intarsia_quantized.modules import SCALES, Module, bytes_of, centred, decoded, group_of, unsigned
from intarsia_quantized.options import QuantizedOptions
from intarsia_quantized.stored import Activations, Grouped, Layout, stored

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
#: One in every number of a word, by its bits.
_ONES = {4: 0x11111111, 8: 0x01010101}
#: `checkpoint_format` -> whether zero points are stored less 1.
_FORMATS = {"gptq": True, "gptq_v2": False}
_MAX_GROUP = 1 << 20


@frozen
class _Scheme:
    """What the config says of all matrices."""

    bits: int
    group: int | None
    symmetric: bool
    permutes: bool
    less_one: bool
    activations: Activations

    @classmethod
    def read(cls, fields: Fields, activations: Activations) -> _Scheme:
        bits = fields.size("bits")
        if bits not in _ONES:
            raise fields.wrong("bits", "4 or 8")
        fields.must_be("is_marlin_format", False)
        group = fields.get("group_size", -1)
        return cls(
            bits=bits,
            group=None if group == -1 else fields.size("group_size", high=_MAX_GROUP),
            symmetric=fields.flag("sym"),
            # Where the config does not say, `g_idx` does.
            permutes=fields.flag("desc_act", True),
            less_one=fields.choice("checkpoint_format", _FORMATS, "gptq"),
            activations=activations,
        )


def decode(
    tensors: Mapping[str, SafetensorsTensor], fields: Fields, options: QuantizedOptions
) -> dict[str, StoredTensor]:
    """Return a model's tensors by their plain names.

    Raises:
        CheckpointError: the config has a value that is not known, or does not fit its tensors.
    """
    scheme = _Scheme.read(fields, options.resolve("float"))
    return decoded(tensors, _PARTS, "qweight", lambda module: _matrix(module, scheme))


def _matrix(module: Module, scheme: _Scheme) -> StoredTensor:
    per_word = 32 // scheme.bits
    rows, outs = module.need("qweight", "qweight", ("I32",), (None, None)).shape
    shape, bits = (outs, rows * per_word), scheme.bits
    if outs % per_word:
        raise CheckpointError(f"tensor {module.name}.qweight has {outs} columns, not a multiple of {per_word}")
    layout = Layout(4 if bits == 4 else 8, shape, scheme.group, scheme.symmetric, scheme.activations)
    module.need("qzeros", "qweight", ("I32",), (layout.num_groups, outs // per_word))
    module.need("scales", "qweight", SCALES, (layout.num_groups, outs))
    permuted = None
    if "g_idx" in module.tensors:
        module.need("g_idx", "qweight", ("I32", "I64"), (shape[1],))
        # The groups are read at once only where they decide whether the matrix can stay as it is.
        permuted = _groups(module, layout) if scheme.permutes else None
    if permuted is not None:
        layout = Layout(layout.bits, shape, scheme.group, scheme.symmetric, scheme.activations, ordered=False)

    def decode() -> Grouped:
        if not scheme.permutes and "g_idx" in module.tensors and _groups(module, layout) is not None:
            raise CheckpointError(f"tensor {module.name}.g_idx permutes columns; quantization_config.desc_act is false")
        words = module.tensors["qweight"].load().t()
        numbers = bytes_of(words) if bits == 4 else centred(bytes_of(words))
        scale = module.tensors["scales"].load().t().contiguous()
        return Grouped(numbers, scale, _zeros(module, scheme), permuted)

    return stored(f"{module.name}.weight", layout, "GPTQ", module.num_bytes(_PARTS), decode)


def _groups(module: Module, layout: Layout) -> torch.Tensor | None:
    return group_of(module.tensors["g_idx"], layout.num_groups, layout.group_columns)


def _zeros(module: Module, scheme: _Scheme) -> torch.Tensor | None:
    """Return the zero points (N, G), or None where all are the middle, as the config says that they are."""
    tensor = module.tensors["qzeros"]
    words = tensor.load().numpy().view(np.uint32)
    if scheme.less_one:
        # As GPTQModel does: to whole words, so that a borrow between the numbers of one is taken back.
        words = words + np.uint32(_ONES[scheme.bits])
    zeros = unsigned(torch.from_numpy(words.view(np.int32)), scheme.bits).t()
    middle = 1 << (scheme.bits - 1)
    if not scheme.symmetric:
        return zeros.to(torch.int16) - (0 if scheme.bits == 4 else middle)
    if not bool((zeros == middle).all()):
        raise CheckpointError(
            f"tensor {tensor.name!r} has zero points other than {middle}; quantization_config.sym is true, and "
            f"checkpoint_format {'gptq' if scheme.less_one else 'gptq_v2'!r}"
        )
    return None
