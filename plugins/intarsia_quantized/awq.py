"""AWQ folders (Lin et al. 2023), as AutoAWQ writes them in its version `gemm`.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `qweight` | int32 | (C, N / 8) | q from 0 to 15, outputs packed in the order below |
| `qzeros` | int32 | (G, N / 8) | zero points, likewise; absent where `zero_point` is false |
| `scales` | float | (G, N) | |

The weight is (q - zero) * scale. A word holds eight neighbouring outputs: from its lowest bits up those at 0, 2, 4, 6,
1, 3, 5 and 7.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from intarsia.checkpoints import SafetensorsTensor
from intarsia.errors import CheckpointError
from intarsia.families import Fields
from intarsia.quantizing.integers import pack_nibbles
from intarsia.types import StoredTensor
from intarsia_quantized.modules import SCALES, Module, decoded, unsigned
from intarsia_quantized.options import QuantizedOptions
from intarsia_quantized.stored import Activations, Grouped, Layout, stored

_PARTS = ("qweight", "qzeros", "scales")
_PER_WORD = 8
#: Where in a word, counted in numbers from its lowest bits, each of its eight outputs is.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MAX_GROUP = 1 << 20
#: Words unpacked at once.
_CHUNK = 1 << 20


def decode(
    tensors: Mapping[str, SafetensorsTensor], fields: Fields, options: QuantizedOptions
) -> dict[str, StoredTensor]:
    """Return a model's tensors by their plain names.

    Raises:
        CheckpointError: the config has a value that is not known, or does not fit its tensors.
    """
    if fields.size("bits", 4) != 4:
        raise fields.wrong("bits", "4")
    version = fields.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.wrong("version", "'gemm', the one packing that is read")
    group = None if fields.get("group_size", -1) == -1 else fields.size("group_size", high=_MAX_GROUP)
    symmetric = not fields.flag("zero_point", True)
    activations = options.resolve("float")
    return decoded(tensors, _PARTS, "qweight", lambda module: _matrix(module, group, symmetric, activations))


def _matrix(module: Module, group: int | None, symmetric: bool, activations: Activations) -> StoredTensor:
    ins, words = module.need("qweight", "qweight", ("I32",), (None, None)).shape
    layout = Layout(4, (words * _PER_WORD, ins), group, symmetric, activations)
    module.need("scales", "qweight", SCALES, (layout.num_groups, words * _PER_WORD))
    if not symmetric:
        module.need("qzeros", "qweight", ("I32",), (layout.num_groups, words))
    elif "qzeros" in module.tensors:
        raise CheckpointError(f"tensor {module.name}.qzeros is there, and quantization_config.zero_point is false")

    def decode() -> Grouped:
        qweight = module.tensors["qweight"].load()
        num_words = max(1, _CHUNK // ins)
        numbers = torch.cat([pack_nibbles(_outputs(part).t()) for part in torch.split(qweight, num_words, dim=1)])
        scale = module.tensors["scales"].load().t().contiguous()
        zero = None if symmetric else _outputs(module.tensors["qzeros"].load()).t().to(torch.int16)
        return Grouped(numbers, scale, zero)

    return stored(f"{module.name}.weight", layout, "AWQ", module.num_bytes(_PARTS), decode)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of words (C, W) in the order of the outputs, (C, 8 W)."""
    return unsigned(words, 4).view(len(words), -1, _PER_WORD)[..., list(_PLACES)].flatten(1)
